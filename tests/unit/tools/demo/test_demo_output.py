"""What the demo prints: whose turn it is, the loss curve, and no claim beyond the measurement."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from hvd_order.planning.report.progress import ProgressBar
from hvd_order.tools.demo.curve import text_curve
from hvd_order.tools.demo.result import DemoResult
from hvd_order.tools.demo.schedule import interleaved_blocks, step_times
from hvd_order.tools.demo.verdict import (
    LOOPBACK,
    TOLERANCE,
    median_interval,
    step_time_table,
    weight_check,
)


def result(
    plain_ms: list[float],
    ordered_ms: list[float],
    *,
    difference: float = 0.0,
    ranks_equal: tuple[bool, bool] = (True, True),
) -> DemoResult:
    return DemoResult(
        systems=["plain DDP", "hvd_order"],
        size=2,
        block_steps=10,
        weights=100,
        train_loss=[[3.0, 2.0], [3.0, 2.0]],
        validation_loss=[2.5, 2.5],
        step_ms=[plain_ms, ordered_ms],
        largest_difference=difference,
        ranks_equal=list(ranks_equal),
        versions={},
    )


def test_systems_take_turns() -> None:
    # steps    0..3  3..6  6..9  9..11 (recorded)
    # first    A     B     A     B
    # second   B     A     B     A
    blocks = list(interleaved_blocks(11, block=3, recorded=2))
    assert [block.system for block in blocks] == [0, 1, 1, 0, 0, 1, 1, 0]
    assert [block.purpose for block in blocks[::2]] == ["warm-up", "timed", "timed", "recorded"]


@pytest.mark.parametrize("steps", [10, 29, 30, 31])
def test_both_systems_train_every_step_once(steps: int) -> None:
    blocks = list(interleaved_blocks(steps, block=10, recorded=5))
    for system in (0, 1):
        mine = [b for b in blocks if b.system == system]
        assert [s for b in mine for s in range(b.first, b.last)] == list(range(steps))
    assert [b.purpose for b in blocks[-2:]] == ["recorded", "recorded"]
    assert {b.last - b.first for b in blocks if b.purpose == "timed"} <= {10}


def test_only_timed_blocks_count() -> None:
    blocks = list(interleaved_blocks(11, block=3, recorded=2))
    seconds = [9.0, 9.0, 0.3, 0.6, 1.2, 1.5, 9.0, 9.0]
    first, second = step_times(blocks, seconds)
    assert first == pytest.approx([200.0, 400.0])
    assert second == pytest.approx([100.0, 500.0])


def test_noise_is_not_called_a_difference() -> None:
    text = "\n".join(
        step_time_table(result([100.0] * 8, [99, 101, 98, 102, 99, 101, 97, 103]), LOOPBACK)
    )
    assert "No difference shown" in text
    assert "No gain is to be expected here" in text


@pytest.mark.parametrize(("ordered_ms", "word"), [(90.0, "shorter"), (120.0, "longer")])
def test_a_difference_in_every_pair_is_named(ordered_ms: float, word: str) -> None:
    text = "\n".join(step_time_table(result([100.0] * 8, [ordered_ms] * 8), LOOPBACK))
    assert f"hvd_order's steps were {word} here (median ratio {ordered_ms / 100:.3f}" in text


@pytest.mark.parametrize("pairs", [1, 5])
def test_few_pairs_say_nothing(pairs: int) -> None:
    text = "\n".join(step_time_table(result([100.0] * pairs, [150.0] * pairs), LOOPBACK))
    assert "too few to tell" in text


def test_no_pairs_at_all() -> None:
    assert step_time_table(result([], []), LOOPBACK) == [
        "step time: too few steps for a measurement"
    ]


def test_median_interval_drops_as_many_as_it_may() -> None:
    # 12 coins: at most 2 of them on one side has a chance of 2 * 79 / 4096 = 3.9 %.
    assert median_interval([float(value) for value in range(12)]) == (2.0, 9.0)
    assert median_interval([1.0] * 5) is None


@pytest.mark.parametrize(
    ("difference", "ranks_equal", "good"),
    [
        (0.0, (True, True), True),
        (TOLERANCE, (True, True), True),
        (2 * TOLERANCE, (True, True), False),
        (0.0, (True, False), False),
    ],
)
def test_weight_check(difference: float, ranks_equal: tuple[bool, bool], good: bool) -> None:
    lines, same = weight_check(result([], [], difference=difference, ranks_equal=ranks_equal))
    assert same is good
    assert ("DIFFERENT" in lines[0]) is (difference > TOLERANCE)
    assert any("NOT EQUAL" in line for line in lines) is (not all(ranks_equal))


def test_result_survives_the_file(tmp_path: Path) -> None:
    before = result([1.0], [2.0])
    before.write(tmp_path / "result.json")
    assert DemoResult.read(tmp_path / "result.json") == before


def test_curves_that_coincide_show_one_mark() -> None:
    lines = text_curve({"a": [4.0, 3.0, 2.0], "b": [4.0, 3.0, 2.0]}, columns=3, rows=3)
    assert lines[:3] == ["  4.00 |*", "  3.00 | *", "  2.00 |  *"]


def test_progress_on_plain_output_is_few_lines() -> None:
    out = io.StringIO()
    bar = ProgressBar(200, out, clock=lambda: 0.0)
    for step in range(200):
        bar.advance(f"step {step + 1}")
    bar.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1].endswith("100%  0:00 < 0:00  step 200")


def test_progress_on_a_terminal_is_one_line() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    bar = ProgressBar(5, out)
    for _ in range(5):
        bar.advance("step")
    bar.close()
    assert out.getvalue().count("\n") == 1
    assert "100%" in out.getvalue().split("\r")[-1]
