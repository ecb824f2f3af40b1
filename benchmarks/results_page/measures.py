"""Figures from raw data: one function a kind of figure; each returns None without data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.hosts import QUEUE_MS
from benchmarks.results_page.documents import Document, Documents, is_by_hand
from benchmarks.results_page.figure import Figure
from benchmarks.runner.records.summary import Ratio, median_interval, paired_ratio

Measure = Callable[[Documents], "Figure | None"]


@dataclass(frozen=True)
class CellOf:
    """Which cell of the side-by-side benchmark."""

    model: str
    hosts: int = 2
    rate_mbit: float = 1000.0
    ratio: float | None = 1.0
    framework: str = "torch"
    clipped: bool = False

    def find(self, documents: Documents, *systems: str) -> tuple[Document, dict[str, Any]] | None:
        """The newest such cell in which all these systems ran, and its file.

        Runs whose slices were set by hand do not count.
        """
        for document in documents.of("side_by_side", "cells"):
            settings = document.content["settings"]
            if is_by_hand(document) or settings.get("framework", "torch") != self.framework:
                continue
            for cell in document.raw["cells"]:
                setting = cell["setting"]
                same = (
                    setting["model"] == self.model
                    and setting["hosts"] == self.hosts
                    and setting["rate_mbit"] == self.rate_mbit
                    and setting["ratio"] == self.ratio
                    and setting["late"] == 1.0
                    and (setting.get("clip") is not None) == self.clipped
                )
                if same and all(system in cell["systems"] for system in systems):
                    return document, cell
        return None


def over_optimum(cell: CellOf, system: str = "hvd_order") -> Measure:
    """Median step over the optimum."""

    def measure(documents: Documents) -> Figure | None:
        found = cell.find(documents, system)
        if found is None:
            return None
        document, data = found
        steps = [s / data["optimum_s"] for s in data["systems"][system]["seconds"]]
        return _median(steps, document)

    return measure


def step_ratio(cell: CellOf, system: str, other: str) -> Measure:
    """Steps of a system over those of another, pair by pair."""

    def measure(documents: Documents) -> Figure | None:
        found = cell.find(documents, system, other)
        if found is None:
            return None
        document, data = found
        seconds = [data["systems"][name]["seconds"] for name in (system, other)]
        return _ratio(paired_ratio(*seconds), document)

    return measure


def ratio_over_bounds(cell: CellOf, system: str, other: str) -> Measure:
    """Steps of a system over those of one that sends whole gradients, over the bounds' ratio.

    The cell is clipped. The bounds are the optimum and that of whole all-reduces.
    """

    def measure(documents: Documents) -> Figure | None:
        found = cell.find(documents, system, other)
        if found is None:
            return None
        document, data = found
        ratio = paired_ratio(*(data["systems"][name]["seconds"] for name in (system, other)))
        bounds = data["optimum_s"] / data["clip_bounds"]["unsplit_s"]
        return Figure(ratio.median / bounds, ratio.low / bounds, ratio.high / bounds, document)

    return measure


def overhead(documents: Documents) -> Figure | None:
    document = documents.newest("overhead", "seconds")
    if document is None:
        return None
    seconds = document.raw["seconds"]
    return _ratio(paired_ratio(seconds["hvd_order"], seconds["plain"]), document)


def one_host(ranks: int, model: str = "linear8") -> Measure:
    """Step of the default over DDP's with so many ranks on one machine, by turn."""

    def measure(documents: Documents) -> Figure | None:
        for document in documents.of("one_host", "rows"):
            if document.content["settings"]["model"] != model:
                continue
            for row in document.raw["rows"]:
                if row["ranks"] == ranks:
                    turns = {
                        name: [statistics.median(turn) for turn in one["seconds"]]
                        for name, one in row["systems"].items()
                    }
                    return _ratio(paired_ratio(turns["hvd_order"], turns["ddp"]), document)
        return None

    return measure


def language_loop(system: str, quantity: str) -> Measure:
    """A system's step, bytes sent or state over those of DDP with weights of the same type."""

    def measure(documents: Documents) -> Figure | None:
        document = documents.newest("sharded", "systems")
        if document is None or system not in document.raw["systems"]:
            return None
        systems = document.raw["systems"]
        base = "ddp, bfloat16" if system.endswith("bfloat16") else "ddp"
        ours, theirs = systems[system][quantity], systems[base][quantity]
        if quantity == "seconds":
            return _ratio(paired_ratio(ours, theirs), document)
        value = statistics.median(ours) / statistics.median(theirs)
        return Figure(value, value, value, document)

    return measure


def cost_ratio(benchmark: str) -> Measure:
    """Cost in this tree over the cost in the other one of `before_after`."""

    def measure(documents: Documents) -> Figure | None:
        for document in documents.of("before_after", "costs"):
            if costs := document.raw["costs"].get(benchmark):
                return _ratio(paired_ratio(costs["now"], costs["before"]), document)
        return None

    return measure


def throughput(slice_mib: float, agreement: str = "leader") -> Measure:
    """Throughput over that of the better plain variant."""

    def measure(documents: Documents) -> Figure | None:
        for document in documents.of("throughput", "results"):
            for result in document.raw["results"]:
                seconds = result["seconds"]
                if result["slice_mib"] == slice_mib and agreement in seconds:
                    plain = ("plain window", "plain at once")
                    better = min(plain, key=lambda name: statistics.median(seconds[name]))
                    return _ratio(paired_ratio(seconds[better], seconds[agreement]), document)
        return None

    return measure


def events_per_s(policy: str, slices: int) -> Measure:
    """Million events a second of the scheduler."""

    def measure(documents: Documents) -> Figure | None:
        for document in documents.of("scheduler_events", "rows"):
            for row in document.raw["rows"]:
                if (row["policy"], row["slices"]) == (policy, slices):
                    return _median(row["rates"], document)
        return None

    return measure


def seconds_of(benchmark: str, name: str) -> Measure:
    """Median of a list of ``raw.seconds``."""

    def measure(documents: Documents) -> Figure | None:
        for document in documents.of(benchmark, "seconds"):
            if name in document.raw["seconds"]:
                return _median(document.raw["seconds"][name], document)
        return None

    return measure


def prediction_error(kind: str, worst: bool) -> Measure:
    """Difference of measured and predicted step: median, or largest."""

    def measure(documents: Documents) -> Figure | None:
        for document in documents.of("simulate", "rows"):
            errors = [abs(row["measured_s"] / row["predicted_s"] - 1)
                      for row in document.raw["rows"] if row.get("kind") == kind]  # fmt: skip
            if errors:
                return _exact(max(errors) if worst else statistics.median(errors), document)
        return None

    return measure


def ordered_servers(documents: Documents) -> Figure | None:
    document = documents.newest("parameter_server", "ordered")
    if document is None:
        return None
    seconds = document.raw["ordered"]["seconds"]
    return _ratio(paired_ratio(seconds["in order"], seconds["as it comes"]), document)


def ordered_over_wire(documents: Documents) -> Figure | None:
    """Step of a synchronous job, in order, over the time of the busiest line's transfers."""
    document = documents.newest("parameter_server", "ordered")
    if document is None:
        return None
    part = document.raw["ordered"]
    over = [seconds / part["wire_s"] for seconds in part["seconds"]["in order"]]
    return _median(over, document)


def raw_share(documents: Documents) -> Figure | None:
    """Of the full-duplex bound, with the best piece size."""
    document = documents.newest("parameter_server", "raw")
    if document is None:
        return None
    part = document.raw["raw"]
    best = min(part["seconds"].values(), key=statistics.median)
    return _median([part["bound_s"] / seconds for seconds in best], document)


def balance_gain(documents: Documents) -> Figure | None:
    """Even split over balanced, both in the steady state."""
    for document in documents.of("parameter_server", "straggler"):
        runs = document.raw["straggler"].get("densenet121, slow line")
        if runs:
            even = statistics.median(runs["even"]["seconds"][4:])
            return _median([even / s for s in runs["balanced"]["seconds"][24:]], document)
    return None


def longest_pause(documents: Documents) -> Figure | None:
    document = documents.newest("parameter_server", "elastic")
    if document is None:
        return None
    part = document.raw["elastic"]
    steps = [step for result in part["results"] for step in result["steps"]]
    median = statistics.median(seconds for _, seconds in steps)
    longest = max(
        seconds
        for begin, seconds in steps
        if any(begin + seconds >= first and begin <= last for _, first, last in part["events"])
    )
    return _exact(longest - median, document)


def restart(documents: Documents) -> Figure | None:
    document = documents.newest("elastic", "trials")
    if document is None:
        return None
    return _median([trial["restart_s"] for trial in document.raw["trials"]], document)


def wrong_trials(documents: Documents) -> Figure | None:
    document = documents.newest("elastic", "trials")
    if document is None:
        return None
    return _exact(sum(not trial["right"] for trial in document.raw["trials"]), document)


def failed_gpu_checks(documents: Documents) -> Figure | None:
    """How many checks failed when they ran last."""
    runs = list(documents.of("gpu", "checks"))
    if not runs:
        return None
    outcomes = last_outcomes(runs)
    return _exact(sum(one["outcome"] == "FAIL" for one, _ in outcomes.values()), runs[0])


def last_outcomes(runs: Sequence[Document]) -> dict[str, tuple[dict[str, Any], Document]]:
    """Of each check the newest outcome, but one that was skipped, and its file.

    Args:
        runs: the newest first.
    """
    found: dict[str, tuple[dict[str, Any], Document]] = {}
    for run in runs:
        for name, outcome in run.raw["checks"].items():
            if outcome["outcome"] != "SKIP":
                found.setdefault(name, (outcome, run))
    return found


def node_ratio(model: str) -> Measure:
    """hvd_order's step over the fastest other system's, on real nodes."""

    def measure(documents: Documents) -> Figure | None:
        for document in documents.of("nodes", "rows"):
            for summary in document.content["summary"]["rows"]:
                if summary["model"] == model and "against" in summary:
                    ratio = summary["against"]["ratio"]
                    return Figure(ratio["median"], ratio["low"], ratio["high"], document)
        return None

    return measure


def queues_of(document: Document) -> str:
    """How the emulated hosts of a prediction queued packets; empty: as usual."""
    settings = document.content["settings"]
    words = ["ACKs first"] if settings.get("acks_first") else []
    if (ms := settings.get("queue_ms", QUEUE_MS)) != QUEUE_MS:
        words.append(f"queues of {ms:g} ms")
    return ", ".join(words)


def throughput_cells(
    documents: Documents, cells: str = "cells", queues: str = ""
) -> list[tuple[dict[str, Any], Document]]:
    """Predicted and measured throughput, of a cell the newest, and where each stands.

    Cells with a delay bound are left out.

    Args:
        cells: "cells" of hvd_order's servers, "strategy_cells" of TensorFlow's.
        queues: of which hosts, in the words of `queues_of`.
    """
    found: dict[tuple[Any, ...], tuple[dict[str, Any], Document]] = {}
    for document in documents.of("prediction", cells):
        if queues_of(document) == queues:
            for cell in document.raw[cells]:
                if cell["mode"] != "bounded":
                    key = tuple(cell[k] for k in ("model", "rate_mbit", "mode", "workers"))
                    found.setdefault(key, (cell, document))
    return list(found.values())


def throughput_error(share: float, cells: str = "cells", queues: str = "") -> Measure:
    """The error of the predicted throughput that this share of `throughput_cells` stays below."""

    def measure(documents: Documents) -> Figure | None:
        found = throughput_cells(documents, cells, queues)
        if not found:
            return None
        newest = found[0][1]
        errors = sorted(abs(cell["error"]) for cell, _ in found)
        if share == 0.5:
            return _median(errors, newest)
        return _exact(errors[min(len(errors) - 1, int(share * len(errors)))], newest)

    return measure


def published_error(application: str, split: str, form: str) -> Measure:
    """The median error of a form on published measurements.

    Args:
        split: numbers of nodes that it was fitted to and predicted, as in the result file.
    """

    def measure(documents: Documents) -> Figure | None:
        for document in documents.of("prediction", "published"):
            found = document.raw["published"].get(application, {}).get(split)
            if found:
                return _exact(statistics.median(found[form]), document)
        return None

    return measure


def link_share(documents: Documents) -> Figure | None:
    """The slowest link's rate over what TCP can carry."""
    document = documents.newest("hosts", "received_mbit")
    if document is None:
        return None
    shares = document.content["summary"]["share_of_bound"].values()
    return _exact(min(share for each in shares for share in each), document)


def agreement_ratio(ranks: int) -> Measure:
    """Steps with leader agreement over those in DDP's order, no rank late."""

    def measure(documents: Documents) -> Figure | None:
        for document in documents.of("agreement", "ranks"):
            if str(ranks) in document.raw["ranks"]:
                steps = document.raw["ranks"][str(ranks)]["steps"]["stragglers"]["none"]["seconds"]
                return _ratio(paired_ratio(steps["leader"], steps["like DDP"]), document)
        return None

    return measure


def device_wait(wait: str) -> Measure:
    """Steps on the test device over the optimum of their chain."""

    def measure(documents: Documents) -> Figure | None:
        document = documents.newest("device_wait", "seconds")
        if document is None or wait not in document.raw["seconds"]:
            return None
        seconds = document.raw["seconds"][wait]
        return _ratio(paired_ratio(seconds, document.raw["optimum_s"]), document)

    return measure


def search_over_best(which: str) -> Measure:
    """Steps in the search's order over the shortest of all orders, mean or worst."""

    def measure(documents: Documents) -> Figure | None:
        document = documents.newest("planning", "over_best")
        if document is None:
            return None
        ratios = document.raw["over_best"]["search"]
        return _exact(statistics.mean(ratios) if which == "mean" else max(ratios), document)

    return measure


def agreement_share(documents: Documents) -> Figure | None:
    """What leader agreement adds to a step of 1,024 ranks, the worst of models and links."""
    document = documents.newest("scale", "steps")
    if document is None:
        return None
    rows = [r for r in document.raw["steps"] if (r["ranks"], r["agreement"]) == (1024, "leader")]
    return _exact(max(row["added_s"] / row["step_s"] for row in rows), document)


def _median(values: Sequence[float], source: Document) -> Figure:
    low, high = median_interval(values)
    return Figure(statistics.median(values), low, high, source)


def _ratio(ratio: Ratio, source: Document) -> Figure:
    return Figure(ratio.median, ratio.low, ratio.high, source)


def _exact(value: float, source: Document) -> Figure:
    return Figure(value, value, value, source)
