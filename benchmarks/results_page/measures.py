"""Figures from raw data: what a target declares is made of these.

A *find* takes a result file and gives the figure with its interval; it raises LookupError where the
file lacks the data, and then the next older file is asked.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.hosts import QUEUE_MS
from benchmarks.results_page.documents import Document, Documents, is_by_hand
from benchmarks.results_page.figure import Figure
from benchmarks.runner.records.summary import median_interval, paired_ratio
from benchmarks.torch.slow_ranks import is_right

Found = tuple[float, float, float]
Find = Callable[[Document], Found]
Part = Callable[[Document], Any]
Measure = Callable[[Iterable[Document]], "Figure | None"]


def newest(find: Find) -> Measure:
    """The figure of the newest file that has it."""

    def measure(documents: Iterable[Document]) -> Figure | None:
        for document in documents:
            try:
                return Figure(*find(document), document)
            except LookupError:
                continue
        return None

    return measure


# ---- which part of a file ----


def whole(document: Document) -> Any:
    """All raw data."""
    return document.raw


@dataclass(frozen=True)
class CellOf:
    """Which cell of the side-by-side benchmark; runs with slices set by hand do not count."""

    model: str
    hosts: int = 2
    rate_mbit: float = 1000.0
    ratio: float | None = 1.0
    framework: str = "torch"
    clipped: bool = False
    ranks_per_host: int = 1

    def __call__(self, document: Document) -> Any:
        settings = document.content["settings"]
        if is_by_hand(document) or settings.get("framework", "torch") != self.framework:
            raise LookupError(self.model)
        for cell in document.raw["cells"]:
            setting = cell["setting"]
            clipped = setting.get("clip") is not None
            fields = (setting["model"], setting["hosts"], setting["rate_mbit"], setting["ratio"],
                      setting.get("ranks_per_host", 1))  # fmt: skip
            wanted = (
                self.model, self.hosts, self.rate_mbit, self.ratio, self.ranks_per_host,
            )  # fmt: skip
            if fields == wanted and setting["late"] == 1.0 and clipped == self.clipped:
                return cell
        raise LookupError(self.model)

    def find(self, documents: Documents, *systems: str) -> tuple[Document, dict[str, Any]] | None:
        """The newest such cell in which all these systems ran, and its file."""
        for document in documents.of("side_by_side"):
            try:
                cell = self(document)
            except LookupError:
                continue
            if all(system in cell["systems"] for system in systems):
                return document, cell
        return None


def at(part: Any, path: str) -> Any:
    """What lies at a path of keys, "systems/ddp/seconds".

    "rows/ranks=2,model=linear8" is the first of the rows with these fields.
    """
    for name in path.split("/"):
        if isinstance(part, list):
            wanted = [pair.split("=", 1) for pair in name.split(",")]
            rows = [row for row in part if all(str(row.get(k)) == v for k, v in wanted)]
            if not rows:
                raise LookupError(name)
            part = rows[0]
        else:
            part = part[name]
    return part


# ---- what is made of it ----


def ratio(over: str, under: str, of: Part = whole, by_turn: bool = False) -> Find:
    """Ratio of two lists, pair by pair; ``by_turn``: they are lists of turns, whose medians."""

    def find(document: Document) -> Found:
        lists = [at(of(document), path) for path in (over, under)]
        if by_turn:
            lists = [[statistics.median(turn) for turn in each] for each in lists]
        found = paired_ratio(*lists)
        return found.median, found.low, found.high

    return find


def median(path: str, of: Part = whole, per: str | None = None) -> Find:
    """Median of a list, over a number of the same part."""

    def find(document: Document) -> Found:
        part = of(document)
        unit = 1.0 if per is None else at(part, per)
        return median_of([value / unit for value in at(part, path)])

    return find


def value(path: str, reduce: Callable[[Any], float | Found] = float) -> Find:
    """What a function makes of what lies at a path of the raw data, or behind "summary/".

    It gives a number, or one with its interval.
    """

    def find(document: Document) -> Found:
        of, _, rest = path.partition("/")
        part = at(document.content if of == "summary" else document.raw, path if rest else of)
        found = reduce(part)
        return found if isinstance(found, tuple) else (found, found, found)

    return find


def median_of(values: Sequence[float]) -> Found:
    """The median with its interval."""
    return (statistics.median(values), *median_interval(values))


def over_bounds(over: str, under: str, of: Part) -> Find:
    """As `ratio`, over that of the clipped cell's bounds: the optimum, and whole all-reduces."""

    def find(document: Document) -> Found:
        part = of(document)
        bounds = part["optimum_s"] / part["clip_bounds"]["unsplit_s"]
        value, low, high = ratio(over, under, of)(document)
        return value / bounds, low / bounds, high / bounds

    return find


def over_better_plain(seconds: Any) -> Found:
    """Throughput of leader agreement over that of the better plain variant."""
    better = min(("plain window", "plain at once"), key=lambda n: statistics.median(seconds[n]))
    found = paired_ratio(seconds[better], seconds["leader"])
    return found.median, found.low, found.high


def longest_pause(part: Any) -> float:
    """The longest step while a server comes, goes or dies, less the median step."""
    steps = [step for result in part["results"] for step in result["steps"]]
    longest = max(
        seconds
        for begin, seconds in steps
        if any(begin + seconds >= first and begin <= last for _, first, last in part["events"])
    )
    return float(longest - statistics.median(seconds for _, seconds in steps))


def largest_error(runs: Any) -> float:
    """The largest ``error`` of some runs, of either sign."""
    return max(abs(run["error"]) for run in runs)


def named_right(runs: Any) -> float:
    """The share of runs of `slow_ranks` whose rank and cause were named in time."""
    return sum(is_right(run) for run in runs) / len(runs)


def share_of_bound(part: Any) -> Found:
    """Of the setting that is the fastest in the median."""
    fastest = min(part["seconds"].values(), key=statistics.median)
    return median_of([part["bound_s"] / seconds for seconds in fastest])


def balanced(runs: Any) -> Found:
    """Step of the even split over that of slices that move, both in the steady state."""
    even = statistics.median(runs["even"]["seconds"][4:])
    return median_of([even / seconds for seconds in runs["balanced"]["seconds"][24:]])


def spread(values: Sequence[float], middle: Callable[[Sequence[float]], float]) -> Found:
    """The middle of some draws, with the least and the most."""
    return middle(values), min(values), max(values)


# ---- figures of several files ----


def last_outcomes(runs: Iterable[Document]) -> dict[str, tuple[dict[str, Any], Document]]:
    """Of each check on a GPU the newest outcome, but one that was skipped, and its file."""
    found: dict[str, tuple[dict[str, Any], Document]] = {}
    for run in runs:
        for name, outcome in run.raw["checks"].items():
            if outcome["outcome"] != "SKIP":
                found.setdefault(name, (outcome, run))
    return found


def failed_gpu_checks(documents: Iterable[Document]) -> Figure | None:
    """How many checks failed when they ran last."""
    runs = list(documents)
    count = sum(one["outcome"] == "FAIL" for one, _ in last_outcomes(runs).values())
    return Figure(count, count, count, runs[0]) if runs else None


def queues_of(document: Document) -> str:
    """How the emulated hosts of a prediction queued packets; empty: as usual."""
    settings = document.content["settings"]
    words = ["ACKs first"] if settings.get("acks_first") else []
    if (ms := settings.get("queue_ms", QUEUE_MS)) != QUEUE_MS:
        words.append(f"queues of {ms:g} ms")
    return ", ".join(words)


def throughput_cells(
    documents: Iterable[Document], cells: str = "cells", queues: str = ""
) -> list[tuple[dict[str, Any], Document]]:
    """Predicted and measured throughput, of a cell the newest, and where each stands.

    Cells with a delay bound are left out.

    Args:
        cells: "cells" of hvd_order's servers, "strategy_cells" of TensorFlow's.
        queues: of which hosts, in the words of `queues_of`.
    """
    found: dict[tuple[Any, ...], tuple[dict[str, Any], Document]] = {}
    for document in documents:
        for cell in document.raw.get(cells, ()) if queues_of(document) == queues else ():
            if cell["mode"] != "bounded":
                key = tuple(cell[k] for k in ("model", "rate_mbit", "mode", "workers"))
                found.setdefault(key, (cell, document))
    return list(found.values())


def throughput_error(share: float, cells: str = "cells", queues: str = "") -> Measure:
    """The error of the predicted throughput that this share of `throughput_cells` stays below."""

    def measure(documents: Iterable[Document]) -> Figure | None:
        found = throughput_cells(documents, cells, queues)
        if not found:
            return None
        errors = sorted(abs(cell["error"]) for cell, _ in found)
        error = errors[min(len(errors) - 1, int(share * len(errors)))]
        interval = median_of(errors) if share == 0.5 else (error, error, error)
        return Figure(*interval, found[0][1])

    return measure
