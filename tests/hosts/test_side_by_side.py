"""The side-by-side benchmark: its yardstick is right, and all of its machinery runs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "side_by_side")]

from hosts import why_not  # noqa: E402
from optimum import optimum_s  # noqa: E402
from profiles import PROFILES  # noqa: E402

PARAMETERS = {  # as published, in millions
    "resnet50": 25.557, "vgg16": 138.358, "densenet121": 7.979, "gpt2_small": 124.440,
    "bert_large": 336.2,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_profiles_have_the_published_sizes(name: str) -> None:
    profile = PROFILES[name]()
    millions = profile.size_bytes / 4e6
    assert millions == pytest.approx(PARAMETERS[name], rel=2e-3)
    assert profile.scaled_to(3.0).compute_s == pytest.approx(3.0)


def test_one_layer_cannot_overlap() -> None:
    assert optimum_s([1.0], [2.0], [4.0]) == pytest.approx(7.0)


def test_many_equal_layers_hide_all_but_the_ends() -> None:
    count = 1000
    step_s = optimum_s([1 / count] * count, [2 / count] * count, [3 / count] * count)
    assert step_s == pytest.approx(3.0, rel=0.01)


def test_a_large_first_layer_is_waited_for() -> None:
    # Its gradient comes last and is needed first: nothing can hide it.
    assert optimum_s([1.0, 1.0], [1.0, 1.0], [5.0, 0.0]) == pytest.approx(9.0)
    # A large last layer hides behind all the others.
    assert optimum_s([2.0, 1.0], [2.0, 1.0], [0.0, 4.0]) == pytest.approx(6.0)


def test_no_order_beats_the_optimum() -> None:
    """Against non-preemptive schedules in random orders."""
    pick = random.Random(5)
    for _ in range(200):
        count = pick.randint(1, 5)
        forward, backward, wire = ([pick.uniform(0.1, 1.0) for _ in range(count)] for _ in range(3))
        ready, now = [0.0] * count, 0.0
        for i in reversed(range(count)):
            now += backward[i]
            ready[i] = now
        order = pick.sample(range(count), count)
        link, arrived = 0.0, [0.0] * count
        for i in order:
            link = max(link, ready[i]) + wire[i]
            arrived[i] = link
        for i in range(count):
            now = max(now, arrived[i]) + forward[i]
        assert optimum_s(forward, backward, wire) <= now + 1e-9


@pytest.mark.timeout(240)
@pytest.mark.skipif(why_not() is not None, reason=f"no emulated hosts here: {why_not()}")
def test_the_comparison_runs() -> None:
    command = [sys.executable, "-m", "hvd_order.cli", "bench", "--quick", "--name", "quick_test"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path = ROOT / "out" / "benchmarks" / "quick_test.json"
    cells = json.loads(path.read_text())["cells"]
    assert [cell["setting"]["model"] for cell in cells] == ["resnet50", "densenet121"]
    for cell in cells:
        assert cell["same_weights"]
        assert set(cell["systems"]) == {"local", "ddp", "hvd_order"}
        for name, system in cell["systems"].items():
            assert len(system["seconds"]) == 3
            sent = min(system["sent_bytes"])
            # Between two hosts a ring sends each gradient once; headers come on top.
            assert name == "local" or 0.999 < sent / cell["size_bytes"] < 1.1
    for kind in ("bars", "efficiency", "step"):
        assert path.with_name(f"quick_test_{kind}.png").stat().st_size > 1000
