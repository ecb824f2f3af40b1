"""Compares policies by the metrics of their runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvd_order.cluster.report.interval import Mean, mean_of
from hvd_order.cluster.report.units import time_unit
from hvd_order.cluster.simulate.compare import RunResult
from hvd_order.planning.report.page import ReportContent, Section

__all__ = ["comparison_report", "subtitles"]

_TIMES = {"completion_mean_s": "mean completion", "completion_p95_s": "p95",
          "completion_p99_s": "p99", "makespan_s": "makespan"}  # fmt: skip
_USED = "utilisation_"
_DECISIONS = "Mean decision time of a policy (processor time; differs from call to call)"


@dataclass(frozen=True)
class _Column:
    heading: str
    metric: str
    text: Callable[[float], str]


def comparison_report(
    title: str, facts: Sequence[str], results: Sequence[RunResult]
) -> ReportContent:
    """A row for each policy: means over its seeds, with their intervals.

    The same results give the same text but for the times that decisions took, which stand in a
    section of their own at the end.

    Args:
        facts: sentences about workload, machines and rules, to which this adds how to read it.
    """
    means = _means(results)
    columns = _columns(means)
    table = [["policy", *(column.heading for column in columns)]]
    for name, found in means.items():
        cells = [_cell(found[column.metric], column.text) for column in columns]
        table.append([name, *cells])
    seeds = len({result.seed for result in results})
    notes = [
        f"Means over {seeds} seeds; ± is half of the 95 % interval, by Student's t over seeds. "
        "Without ±: all seeds give the same."
        if seeds > 1
        else "One run for each policy, so there are no intervals.",
        "Completion: from arrival to end. In use: from the first arrival to the last end.",
        "Worst fairness: the largest finish-time fairness of a job; unfair: jobs above 1.1. "
        "Changes: of placements.",
    ]
    decisions = [
        (found["decision_mean_s"].value,
         f"{name}, the longest {1e3 * found['decision_longest_s'].value:.2f} ms")
        for name, found in means.items()
    ]  # fmt: skip
    return ReportContent(title, [*facts, *notes], table, [Section(_DECISIONS, decisions)])


def subtitles(results: Mapping[str, RunResult]) -> dict[str, str]:
    """What stands above the pictures of runs, all times in one unit."""
    means = [result.metrics["completion_mean_s"] for result in results.values()]
    unit, unit_s = time_unit(max((m for m in means if not math.isnan(m)), default=0.0))
    found = {}
    for name, result in results.items():
        metrics = result.metrics
        text = f"{name}: {_count(metrics['completed'])} of {_count(metrics['jobs'])} jobs ended"
        if metrics["completed"]:
            text += f", mean completion {_number(metrics['completion_mean_s'] / unit_s)} {unit}"
        found[name] = f"{text}, utility {_number(metrics['utility'])}"
    return found


def _means(results: Sequence[RunResult]) -> dict[str, dict[str, Mean]]:
    """By policy and metric."""
    by_policy: dict[str, list[Mapping[str, float]]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result.metrics)
    return {
        policy: {name: mean_of([run[name] for run in runs]) for name in runs[0]}
        for policy, runs in by_policy.items()
    }


def _columns(means: Mapping[str, Mapping[str, Mean]]) -> list[_Column]:
    first = next(iter(means.values()))
    columns = [_Column("ended", "completed", _count)]
    if any(found["rejected"].value for found in means.values()):
        columns.append(_Column("rejected", "rejected", _count))
    columns.append(_Column("utility", "utility", _number))
    for metric, heading in _TIMES.items():
        # One unit a column: rows are read against each other. Quantiles have the mean's.
        judged = metric if metric == "makespan_s" else "completion_mean_s"
        known = [m for found in means.values() if not math.isnan(m := found[judged].value)]
        unit, unit_s = time_unit(max(known, default=0.0))
        columns.append(_Column(f"{heading}, {unit}", metric, _scaled(1 / unit_s)))
    used = [name for name in first if name.startswith(_USED)]
    shown = f"{_USED}gpu" if f"{_USED}gpu" in used else used[0]
    columns += [
        _Column(f"{shown.removeprefix(_USED)} in use, %", shown, _scaled(100.0)),
        _Column("worst fairness", "fairness_worst", _number),
        _Column("unfair, %", "unfair_share", _scaled(100.0)),
        _Column("changes", "changes", _count),
    ]
    return columns


def _cell(mean: Mean, text: Callable[[float], str]) -> str:
    if math.isnan(mean.value):
        return "-"
    return text(mean.value) + (f" ± {text(mean.half)}" if mean.half else "")


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _scaled(factor: float) -> Callable[[float], str]:
    return lambda value: _number(factor * value)
