"""Fits the formulas of Optimus and Pollux to measured or simulated throughput."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import TypeVar

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.predict.workers.closed_forms import OptimusAsync, OptimusSync, Pollux

__all__ = ["fit_optimus_async", "fit_optimus_sync", "fit_pollux", "fit_step_time", "least_squares"]

Formula = TypeVar("Formula", bound=Pollux)

_GAMMAS = [1 + i / 4 for i in range(37)]  # Pollux allows 1 to 10
# Of the terms in the order of Pollux' fields: ac, bc, an, bn, gamma, al, bl.
_RANGES = [(0.0, math.inf)] * 4 + [(1.0, 10.0)] + [(0.0, math.inf)] * 2
_SYNC_OF_NODES, _GAMMA, _SYNC_OF_A_NODE = 2, 4, 5
_MOST_ROUNDS = 200


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
    found = _eliminated(lines)
    return None if found is None else [x / each for x, each in zip(found, scale, strict=True)]


def _eliminated(lines: list[list[float]]) -> list[float] | None:
    """Solves linear equations, a line each with its right side last; None if singular."""
    count = len(lines)
    for i in range(count):
        pivot = max(range(i, count), key=lambda k: abs(lines[k][i]))
        if abs(lines[pivot][i]) < 1e-10:
            return None
        lines[i], lines[pivot] = lines[pivot], lines[i]
        for k in range(count):
            if k != i:
                factor = lines[k][i] / lines[i][i]
                lines[k] = [a - factor * b for a, b in zip(lines[k], lines[i], strict=True)]
    return [lines[i][-1] / lines[i][i] for i in range(count)]


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

    Makes the squares of log(predicted / measured) least, as Pollux does (Qiao et al., OSDI 2021,
    section 4.1), by the method of Levenberg and Marquardt (Marquardt, SIAM Journal on Applied
    Mathematics 11(2), 1963). It begins with the best of some gammas, for each of which the other
    terms are fitted one after the other. What nothing was measured of (several workers on one
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
        error = _squares(tried, measured)
        if error < least:
            best, least = tried, error
    return _refined(best, measured)


def _squares(formula: Pollux, measured: Sequence[tuple[float, int, int, float]]) -> float:
    total = 0.0
    for batch, workers, nodes, step_s in measured:
        ratio = formula.step_s(batch, workers, nodes) / step_s
        if ratio <= 0:
            return math.inf
        total += math.log(ratio) ** 2
    return total


def _refined(formula: Formula, measured: Sequence[tuple[float, int, int, float]]) -> Formula:
    """Changes all terms together while that makes the squares less."""
    form, terms = type(formula), astuple(formula)
    least, damping = _squares(formula, measured), 1e-3
    for _ in range(_MOST_ROUNDS):
        gram, slope = _derivatives(formula, measured)
        # A term at the end of its range that would leave it stays there.
        free = [
            i for i, (low, high) in enumerate(_RANGES)
            if gram[i][i] > 0 and not (terms[i] <= low and slope[i] > 0)
            and not (terms[i] >= high and slope[i] < 0)
        ]  # fmt: skip
        scale = [math.sqrt(gram[i][i]) for i in range(len(terms))]
        change = _eliminated([
            [*(gram[i][j] / scale[i] / scale[j] + damping * (i == j) for j in free),
             -slope[i] / scale[i]]
            for i in free
        ])  # fmt: skip
        if not change:
            break
        moved = list(terms)
        for i, by in zip(free, change, strict=True):
            moved[i] = min(max(terms[i] + by / scale[i], _RANGES[i][0]), _RANGES[i][1])
        tried = form(*moved)
        error = _squares(tried, measured)
        if error < least:
            is_done = least - error < 1e-10 * least
            formula, terms, least, damping = tried, tuple(moved), error, damping / 3
        else:
            is_done = damping > 1e9
            damping *= 4
        if is_done:
            break
    return formula


def _derivatives(
    formula: Pollux, measured: Sequence[tuple[float, int, int, float]]
) -> tuple[list[list[float]], list[float]]:
    """Products of the derivatives of log(predicted / measured) by the terms, and with itself."""
    count = len(_RANGES)
    gram, slope = [[0.0] * count for _ in range(count)], [0.0] * count
    for batch, workers, nodes, measured_s in measured:
        step_s = formula.step_s(batch, workers, nodes)
        wrong = math.log(step_s / measured_s)
        part = formula.gradient_s(batch) / step_s
        by_gradient = part ** (formula.gamma - 1) / step_s
        row = [by_gradient, by_gradient * batch, 0.0, 0.0, 0.0, 0.0, 0.0]
        if workers > 1:
            sync = formula.sync_s(workers, nodes) / step_s
            by_sync = sync ** (formula.gamma - 1) / step_s
            alpha = _SYNC_OF_A_NODE if nodes == 1 else _SYNC_OF_NODES
            row[alpha] = by_sync
            row[alpha + 1] = by_sync * formula.spread(workers, nodes)
            # part ** gamma + sync ** gamma is 1.
            row[_GAMMA] = sum(
                x**formula.gamma * math.log(x) for x in (part, sync) if x > 0
            ) / formula.gamma  # fmt: skip
        for i in range(count):
            slope[i] += row[i] * wrong
            for j in range(count):
                gram[i][j] += row[i] * row[j]
    return gram, slope
