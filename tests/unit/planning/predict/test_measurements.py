"""Measurements of others: what is read of their files, and how far a fit to few nodes carries."""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.workloads.applications import APPLICATIONS, MeasuredSpeed
from hvd_order.cluster.workloads.load import DATA
from hvd_order.planning.predict.measurements.dl2 import read_dl2
from hvd_order.planning.predict.measurements.pollux import read_pollux
from hvd_order.planning.predict.measurements.ring import Ring, fit_ring
from hvd_order.planning.predict.workers.closed_forms import Pollux
from hvd_order.planning.predict.workers.fit import fit_pollux, fit_step_time

SHIPPED = os.path.join(DATA, "pollux-measurements.csv")
HEADER = "placement,local_bsz,step_time,sync_time\n"


def test_step_time_by_hand() -> None:
    # Gradients 0.02 + 0.002 x 32 = 0.084 s; exchange 0.05 + 0.004 x 3 / 2 = 0.056 s.
    formula = Ring(0.02, 0.002, 0.05, 0.004, 2.0, al=0.01, bl=0.003)
    assert formula.step_s(32, 4, 2) == pytest.approx((0.084**2 + 0.056**2) ** 0.5)
    assert formula.step_s(32, 4, 1) == pytest.approx((0.084**2 + 0.019**2) ** 0.5)
    assert formula.step_s(32, 1, 1) == pytest.approx(0.084)


def test_fit_finds_the_formula_that_made_the_times() -> None:
    true = Ring(0.02, 0.002, 0.05, 0.004, 2.5, al=0.01, bl=0.003)
    rows = [
        (float(batch), workers, nodes, true.step_s(batch, workers, nodes))
        for batch in (8, 16, 32)
        for workers, nodes in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (8, 2))
    ]
    assert fit_ring(rows).step_s(24, 64, 16) == pytest.approx(true.step_s(24, 64, 16), rel=1e-6)


def test_fit_needs_a_worker_alone() -> None:
    with pytest.raises(InvalidUsage, match="one worker"):
        fit_ring([(8.0, 2, 2, 0.5)])


@pytest.mark.parametrize("nodes", [(3, 4), (6, 16)])
@pytest.mark.parametrize("application", APPLICATIONS)
def test_two_nodes_tell_of_more_and_better_than_a_linear_term(
    application: str, nodes: tuple[int, int]
) -> None:
    rows = [measured.row for measured in read_pollux(SHIPPED)[application]]
    few = [row for row in rows if row[2] <= 2]
    rest = [row for row in rows if nodes[0] <= row[2] <= nodes[1]]
    ring, linear = (
        statistics.median(
            abs(formula.step_s(batch, workers, nodes) / step_s - 1)
            for batch, workers, nodes, step_s in rest
        )
        for formula in (fit_ring(few), fit_pollux(few))
    )
    assert ring < 0.6 * linear
    assert ring < (0.36 if nodes[1] == 4 else 0.17)


@pytest.mark.parametrize("form", [Pollux, Ring])
@pytest.mark.parametrize("application", APPLICATIONS)
def test_no_term_of_a_fit_can_be_changed_for_the_better(
    application: str, form: type[Pollux]
) -> None:
    rows = [measured.row for measured in read_pollux(SHIPPED)[application]]
    fitted = fit_step_time(form, rows)

    def squares(formula: Pollux) -> float:
        return sum(
            math.log(formula.step_s(batch, workers, nodes) / step_s) ** 2
            for batch, workers, nodes, step_s in rows
        )

    least = squares(fitted)
    for name, value in asdict(fitted).items():
        for factor in (0.99, 1.01):
            if name != "gamma" or 1 <= factor * value <= 10:
                assert squares(replace(fitted, **{name: factor * value})) >= least * (1 - 1e-6)


@pytest.mark.parametrize("application", APPLICATIONS)
def test_constants_are_those_of_the_shipped_measurements(application: str) -> None:
    rows = [measured.row for measured in read_pollux(SHIPPED)[application]]
    fitted, kept = fit_ring(rows), APPLICATIONS[application].formula
    for batch, workers, nodes, _ in rows:
        assert kept.step_s(batch, workers, nodes) == pytest.approx(
            fitted.step_s(batch, workers, nodes), rel=1e-3
        )


def test_a_share_above_a_worker_s_memory_takes_passes() -> None:
    # 0.1 s a pass and 0.4 s an exchange; 64 samples for each of two workers, 32 a pass.
    speed = MeasuredSpeed(Ring(0.1, 0.0, 0.4, 0.0, 1.0), most_local=32)
    assert speed.samples_per_s(2, 0, 2, 64) == pytest.approx(64 / 0.5)
    assert speed.samples_per_s(2, 0, 2, 128) == pytest.approx(128 / 0.6)


def test_reads_the_artifact_s_folder(tmp_path: Path) -> None:
    for application in ("bert", "ncf"):
        (tmp_path / application).mkdir()
    (tmp_path / "bert" / "placements.csv").write_text(HEADER + "124,4,1.5,0.5\n")
    (tmp_path / "bert" / "scalability.csv").write_text(
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n8,16,4,2.5,0.25\n"
    )
    (tmp_path / "ncf" / "validation-256.csv").write_text("progress\n1\n")
    found = read_pollux(tmp_path)
    assert list(found) == ["bert"]
    assert [m.row for m in found["bert"]] == [(4.0, 7, 3, 1.5), (4.0, 16, 8, 2.5)]
    assert [m.sync_s for m in found["bert"]] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "1,4,0.5,0.1\n102,4,1.5,0.5\n", r"placements.csv, line 3: placement is '102'"),
        (HEADER + "1,4,0,0.1\n", r"placements.csv, line 2: step_time is 0; .* above 0"),
        (HEADER + "1,4,0.5\n", r"placements.csv, line 2: 3 fields; expected 4"),
        (HEADER, r"placements.csv has a header and nothing else"),
        ("", r"placements.csv is empty"),
        ("placement,local_bsz\n1,4\n", r"line 1: no column step_time, sync_time"),
    ],
)
def test_bad_measurements_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "placements.csv").write_text(text)
    with pytest.raises(InvalidUsage, match=message):
        read_pollux(tmp_path)


def test_a_folder_without_measurements_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match=r"placements\.csv"):
        read_pollux(tmp_path)


def test_speeds_of_dl2_are_of_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "config_speed.txt"
    path.write_text(
        "('m', 'dist_sync', 32, 1, 2, [8.0, 7.5], [1.9], [0.4, 0.4])\n\n"
        "('m', 'dist_async', 32, 3, 1, [20.0], [1.9, 1.8, 1.7], [0.5])\n"
    )
    first, second = read_dl2(path)
    assert (first.workers, first.servers, first.samples_per_s, first.synchronous) == (
        2, 1, 15.5, True,
    )  # fmt: skip
    assert (second.workers, second.servers, second.synchronous) == (1, 3, False)


def test_lines_of_dl2_without_a_measurement_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "config_speed.txt"
    path.write_text(
        "('vgg-16', 'dist_sync', 32, 5, 2, [0.0, 0.0], [0.9], [0.0, 0.0])\n"
        "('vgg-16', 'dist_sync', 32, 5, 3, [0.05, 0.0, 0.05], [0.9], [0.1, 0.1, 0.1])\n"
    )
    (only,) = read_dl2(path)
    assert (only.workers, only.samples_per_s) == (3, pytest.approx(0.1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("('m', 'dist_sync', 32, 1, 1, [5.0], [1], [1])\n('m', 'dist_s\n", "line 2"),
        ("('m', 'dist_sync', 32, 1, 3, [5.0, 5.0], [1], [1])\n", "line 1: .*a speed for each"),
        ("('m', 'sync', 32, 1, 1, [5.0], [1], [1])\n", "line 1"),
        ("('m', 'dist_sync', 32, 1, 2, [5.0, -5.0], [1], [1])\n", "line 1"),
        ("__import__('os').getcwd()\n", "line 1"),
    ],
)
def test_bad_lines_of_dl2_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config_speed.txt"
    path.write_text(text)
    with pytest.raises(InvalidUsage, match=message):
        list(read_dl2(path))
