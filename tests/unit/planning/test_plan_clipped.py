"""Clipping by the global norm: the bounds are what a link can do at best, second by second."""

from __future__ import annotations

import random

import pytest
from helpers.oracles.exhaustive_clipped import Gathers, best_clipped_step_s

from hvd_order.planning.bounds.clipped_bound import (
    clipped_chain_optimum_s,
    late_gather_chain_s,
    unsplit_clipped_chain_s,
)


def chain(pick: random.Random) -> tuple[list[int], list[int], list[int]]:
    """Whole seconds of forward, backward and either half of each all-reduce."""
    count = pick.randint(1, 4)
    forward, backward = ([pick.randint(0, 3) for _ in range(count)] for _ in range(2))
    return forward, backward, [pick.randint(0, 8 // count) for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_the_bounds_are_the_best_of_everything_that_a_link_can_do(seed: int) -> None:
    pick = random.Random(seed)
    for _ in range(40):
        forward, backward, half = chain(pick)
        wire = [2 * seconds for seconds in half]
        barrier = pick.randint(0, 2)
        found: dict[Gathers, float] = {
            "early": clipped_chain_optimum_s(forward, backward, wire, barrier),
            "late": late_gather_chain_s(forward, backward, wire, barrier),
        }
        for gathers, step_s in found.items():
            best_s = best_clipped_step_s(forward, backward, half, barrier, gathers)
            assert step_s == best_s, (gathers, forward, backward, half, barrier)
        best_s = best_clipped_step_s(forward, backward, half, gathers="before the norm")
        assert unsplit_clipped_chain_s(forward, backward, wire) == best_s
