"""Fits the formulas of Optimus and Pollux to measured or simulated throughput."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

from hvd_order.errors import InvalidUsage
from hvd_order.predict.workers.closed_forms import OptimusAsync, OptimusSync, Pollux

__all__ = ["fit_optimus_async", "fit_optimus_sync", "fit_pollux", "fit_step_time", "least_squares"]

Formula = TypeVar("Formula", bound=Pollux)

_GAMMAS = [1 + i / 4 for i in range(37)]  # Pollux allows 1 to 10


def least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Coefficients, none negative, that make the relative errors least in the square.

    Of a few unknowns: each set of unknowns that are not 0 is tried.

    Raises:
        InvalidUsage: no row, or a target that is not positive.
    """
    if not rows or min(targets) <= 0:
        raise InvalidUsage(f"{len(rows)} measurements; expected one or more, all of them positive")
    scaled = [[x / t for x in row] for row, t in zip(rows, targets, strict=True)]
    count = len(rows[0])
    best, least = [0.0] * count, math.inf
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            found = _solve([[row[i] for i in chosen] for row in scaled])
            if found is None or min(found) < 0:
                continue
            whole = [0.0] * count
            for i, value in zip(chosen, found, strict=True):
                whole[i] = value
            error = sum(
                (1 - sum(k * x for k, x in zip(whole, row, strict=True))) ** 2 for row in scaled
            )
            if error < least * (1 - 1e-9):
                best, least = whole, error
    return best


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Least squares for a target of 1 in each row, by the normal equations; None if singular."""
    count = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(count)]
    lines = [
        [
            *(sum(row[i] * row[j] for row in rows) / (scale[i] * scale[j]) for j in range(count)),
            sum(row[i] for row in rows) / scale[i],
        ]
        for i in range(count)
    ]
    for i in range(count):
        pivot = max(range(i, count), key=lambda k: abs(lines[k][i]))
        if abs(lines[pivot][i]) < 1e-10:
            return None
        lines[i], lines[pivot] = lines[pivot], lines[i]
        for k in range(count):
            if k != i:
                factor = lines[k][i] / lines[i][i]
                lines[k] = [a - factor * b for a, b in zip(lines[k], lines[i], strict=True)]
    return [lines[i][-1] / lines[i][i] / scale[i] for i in range(count)]


def fit_optimus_async(measured: Sequence[tuple[int, int, float]]) -> OptimusAsync:
    """Fits (workers, servers, steps/s of all workers)."""
    rows = [OptimusAsync.terms(w, p) for w, p, _ in measured]
    return OptimusAsync(*least_squares(rows, [w / rate for w, _, rate in measured]))


def fit_optimus_sync(measured: Sequence[tuple[int, int, float, float]]) -> OptimusSync:
    """Fits (workers, servers, global batch, steps/s of the job)."""
    rows = [OptimusSync.terms(w, p, batch) for w, p, batch, _ in measured]
    return OptimusSync(*least_squares(rows, [1 / rate for *_, rate in measured]))


def fit_pollux(measured: Sequence[tuple[float, int, int, float]]) -> Pollux:
    """Fits (batch a worker, workers, nodes, seconds a step)."""
    return fit_step_time(Pollux, measured)


def fit_step_time(
    form: type[Formula], measured: Sequence[tuple[float, int, int, float]]
) -> Formula:
    """Fits a formula of Pollux' form to (batch a worker, workers, nodes, seconds a step).

    One worker's steps give ac and bc. The rest is fitted for each of some gammas; the one with the
    least squares of relative errors stays. What nothing was measured of (several workers on one
    node, or several nodes) costs nothing.

    Raises:
        InvalidUsage: no measurement of one worker.
    """
    alone = [(batch, step_s) for batch, workers, _, step_s in measured if workers == 1]
    if not alone:
        raise InvalidUsage("no measurement of one worker, which the formula begins with")
    ac, bc = least_squares([[1.0, batch] for batch, _ in alone], [s for _, s in alone])
    best, least = form(ac, bc, 0.0, 0.0, 1.0), math.inf
    for gamma in _GAMMAS:
        sync = {True: (0.0, 0.0), False: (0.0, 0.0)}
        for one_node in sync:
            rows, targets = [], []
            for batch, workers, nodes, step_s in measured:
                rest = step_s**gamma - (ac + bc * batch) ** gamma
                if workers > 1 and (nodes == 1) == one_node and rest > 0:
                    rows.append([1.0, form.spread(workers, nodes)])
                    targets.append(rest ** (1 / gamma))
            if rows:
                alpha, beta = least_squares(rows, targets)
                sync[one_node] = (alpha, beta)
        tried = form(ac, bc, *sync[False], gamma, *sync[True])
        error = _error(tried, measured)
        if error < least:
            best, least = tried, error
    return best


def _error(formula: Pollux, measured: Sequence[tuple[float, int, int, float]]) -> float:
    return sum(
        (formula.step_s(batch, workers, nodes) / step_s - 1) ** 2
        for batch, workers, nodes, step_s in measured
    )
