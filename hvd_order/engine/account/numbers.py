"""A rank's row and its statistics as numbers, in which they travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from hvd_order.base.account.slow_ranks import RankRow
from hvd_order.base.account.step_stats import StepStats

__all__: list[str] = []

_STATS = [each.name for each in dataclasses.fields(StepStats) if each.type in ("int", "float")]
_PARTS = ("backward pass", "host", "update", "loader", "forward pass")
_SCALARS = ("link_s", "run_queue_s", "clock_error_s", "late_slice", "sends_to", "sends_per_s")
_BY_STEP = ("step_s", "latest", "latest_s", "saved_s")
_WHOLE = {"late_slice", "sends_to", "latest"}


def count(steps: int) -> int:
    """How many numbers `packed` returns for a row of so many steps."""
    return len(_STATS) + len(_PARTS) + len(_SCALARS) + steps * len(_BY_STEP)


def step_s(values: Sequence[float]) -> float:
    """The step of the rank whose numbers were `packed`."""
    return values[_STATS.index("step_s")]


def packed(row: RankRow, stats: StepStats) -> list[float]:
    """Returns the numbers of both."""
    return [
        *(float(getattr(stats, name)) for name in _STATS),
        *(row.parts_s[name] for name in _PARTS),
        *(float(getattr(row, name)) for name in _SCALARS),
        *chain.from_iterable(getattr(row, name) for name in _BY_STEP),
    ]


def unpacked(values: Sequence[float], steps: int, like: StepStats) -> tuple[RankRow, StepStats]:
    """Returns what was `packed`.

    Args:
        steps: number of steps of the row.
        like: has the texts, which are alike on all ranks.
    """
    rest = iter(values)
    kinds = {each.name: int if each.type == "int" else float for each in dataclasses.fields(like)}
    numbers: dict[str, Any] = {name: kinds[name](next(rest)) for name in _STATS}
    parts = {name: next(rest) for name in _PARTS}
    scalars: dict[str, Any] = {name: _number(name, next(rest)) for name in _SCALARS}
    by_step: dict[str, Any] = {
        name: [_number(name, next(rest)) for _ in range(steps)] for name in _BY_STEP
    }
    row = RankRow(parts_s=parts, **scalars, **by_step)
    return row, replace(like, **numbers)


def _number(name: str, value: float) -> float | int:
    return int(value) if name in _WHOLE else value
