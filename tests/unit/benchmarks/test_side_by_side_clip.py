"""The side-by-side benchmark with clipping: what its systems do, and the bounds beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.runner.cells.bounds import clipped_optimum_s, layer_s, optimum_s  # noqa: E402
from benchmarks.runner.cells.weights import same_weights  # noqa: E402
from benchmarks.runner.systems import local  # noqa: E402
from benchmarks.runner.workloads.workload import Workload  # noqa: E402

EVENTS = [
    ("a", "forward", 0.0, 1.0), ("b", "forward", 1.0, 2.0),
    ("b", "backward", 2.0, 4.0), ("a", "backward", 4.0, 8.0),
]  # fmt: skip


def step_of(max_norm: float | None) -> torch.Tensor:
    """What one local step adds to four weights, whose gradients are all 10."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    local(Workload(model, lambda: torch.full((1, 4), 10.0), max_norm=max_norm)).step()
    return model.weight.detach()


def test_the_local_step_clips_by_the_global_norm() -> None:
    plain, clipped = step_of(None), step_of(1.0)
    torch.testing.assert_close(clipped, plain / 20)  # a norm of 20 becomes one of 1
    torch.testing.assert_close(step_of(1000.0), plain)


def test_a_loop_with_a_scaler_unscales_before_it_clips() -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    work = Workload(model, lambda: torch.full((1, 4), 10.0), max_norm=1.0, scaled=True)
    local(work).step()
    torch.testing.assert_close(model.weight.detach(), step_of(1.0))


def test_the_whole_local_step_is_spread_over_the_layers() -> None:
    assert layer_s(EVENTS, 16.0) == [(2.0, 8.0), (2.0, 4.0)]


def test_the_bounds_of_a_cell_are_those_of_its_chain() -> None:
    # From 4 s before the end of the backward pass on, b has 6 s to send. Whole or in halves, this
    # lasts until 2 s after it. Late gathers last until 3 s after it. Layer a awaits the norm only.
    found = (EVENTS, [0, 600], 8.0, 6.0)
    assert optimum_s(*found) == pytest.approx(9.0)
    clipped_s, bounds = clipped_optimum_s(*found)
    assert clipped_s == pytest.approx(9.0)
    assert bounds.late_gathers_s == pytest.approx(10.0)
    assert bounds.unsplit_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("other", "plain", "clipped"),
    [
        ([1.0, -2.0, 0.0], True, True),
        ([1.000001, -2.0, 0.0], True, True),
        ([1.01, -2.02, 0.0], False, True),  # one factor: the norm of another sum
        ([1.01, -2.0, 0.0], False, False),
        ([2.0, -4.0, 0.0], False, False),  # not clipped
        ([-1.0, 2.0, 0.0], False, False),
    ],
)
def test_weights_may_differ_by_rounding_and_by_the_norms_rounding(
    other: list[float], plain: bool, clipped: bool
) -> None:
    weights = {"a": [[1.0, -2.0, 0.0]], "b": [[1.0, -2.0, 0.0], other]}
    assert same_weights(weights, clipped=False) is plain
    assert same_weights(weights, clipped=True) is clipped
