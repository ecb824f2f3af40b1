"""Figures of the cluster's policies and of its simulator."""

from __future__ import annotations

import statistics

from benchmarks.results_page.documents import Document, Documents
from benchmarks.results_page.figure import Figure
from benchmarks.results_page.measures import Measure

_FIFO = "fifo, 100000 jobs"


def _exact(value: float, source: Document) -> Figure:
    return Figure(value, value, value, source)


def fidelity(documents: Documents) -> Figure | None:
    """Largest error of a policy's mean completion time, jobs of the usual length."""
    for document in documents.of("cluster", "runs"):
        if document.content["settings"]["scale"] == 1.0:
            return _exact(max(abs(run["error"]) for run in document.raw["runs"]), document)
    return None


def fifo_jobs_per_s(documents: Documents) -> Figure | None:
    """Jobs that the simulator takes a second, first in, first out."""
    document = documents.newest("cluster", _FIFO)
    if document is None:
        return None
    return _exact(100_000 / document.raw[_FIFO]["seconds"], document)


def seconds_a_job(solver: str, machines: int) -> Measure:
    """Processor time of PD-ORS for a job."""
    name = f"pd-ors, {solver}, {machines} machines"

    def measure(documents: Documents) -> Figure | None:
        document = documents.newest("cluster", name)
        return None if document is None else _exact(document.raw[name]["seconds_a_job"], document)

    return measure


def of_optimum(documents: Documents) -> Figure | None:
    """Mean worth of PD-ORS over the offline optimum, small instances."""
    document = documents.newest("cluster", "worth over the optimum")
    if document is None:
        return None
    return _exact(statistics.fmean(document.raw["worth over the optimum"]), document)


def over_oasis(cell: str) -> Measure:
    """Worth of PD-ORS over that of OASiS; median over the draws of jobs."""

    def measure(documents: Documents) -> Figure | None:
        document = documents.newest("cluster", "utility")
        if document is None:
            return None
        found = document.raw["utility"][cell]
        ratios = [p / o for p, o in zip(found["pd-ors"], found["oasis"], strict=True)]
        return Figure(statistics.median(ratios), min(ratios), max(ratios), document)

    return measure


def completion(policy: str) -> Measure:
    """Mean completion time on Pollux' workload 6, in seconds."""

    def measure(documents: Documents) -> Figure | None:
        document = documents.newest("cluster", "tiresias")
        if document is None or policy not in document.raw:
            return None
        values = document.raw[policy]["completion_mean_s"]
        return Figure(statistics.fmean(values), min(values), max(values), document)

    return measure
