"""What the benchmarks of predicted throughput have in common: formulas, a line, the summary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from hvd_order.planning.predict.workers.closed_forms import mean_value_analysis, upper_bound
from hvd_order.planning.predict.workers.fit import (
    fit_optimus_async,
    fit_optimus_sync,
    fit_pollux,
)
from hvd_order.planning.predict.workers.worker_step import WorkerStep

_FORMS = ("mean_value", "bound", "fitted")


def closed_forms(
    step: WorkerStep, link: float, mode: str, measured: dict[int, float]
) -> dict[int, dict[str, float | None]]:
    """What formulas say for each number of workers.

    Optimus' formula, or Pollux' for all-reduce, is fitted to the two smallest measured numbers.
    """
    think_s = statistics.fmean(step.compute_s)
    stations = [sum(step.tensor_bytes) / link] * 2
    few = sorted(measured)[:2]

    def fitted(workers: int) -> float:
        if mode in ("async", "bounded"):
            of_async = fit_optimus_async([(w, 1, measured[w]) for w in few])
            return of_async.steps_per_s(workers, 1)
        if mode == "sync":
            of_sync = fit_optimus_sync([(w, 1, w, measured[w] / w) for w in few])
            return workers * of_sync.steps_per_s(workers, 1, workers)
        alone = [(1.0, 1, 1, think_s)]
        pollux = fit_pollux(alone + [(1.0, w, w, w / measured[w]) for w in few])
        return workers / pollux.step_s(1.0, workers, workers)

    return {
        workers: {
            "mean_value": mean_value_analysis(think_s, stations, workers)[-1]
            if mode in ("async", "bounded") else None,
            "bound": None if mode == "allreduce" else upper_bound(think_s, stations, workers),
            "fitted": None if workers in few else fitted(workers),
        }
        for workers in measured
    }  # fmt: skip


def row(cell: dict[str, Any]) -> str:
    """A cell in a line, as soon as it is measured."""
    forms = " ".join("-" if cell[name] is None else f"{cell[name]:.3f}" for name in _FORMS)
    return (
        f"{cell['model']} {cell['rate_mbit']:g} {cell['mode']} {cell['workers']}: measured "
        f"{cell['measured']:.3f}, predicted {cell['predicted']:.3f}, {cell['error']:+.1%}; {forms}"
    )


def summary_of(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Absolute relative errors: of the prediction, and the median of each closed form. Printed."""
    errors = sorted(abs(cell["error"]) for cell in cells)
    summary = {
        "median_error": statistics.median(errors),
        "p90_error": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "worst_error": errors[-1],
        "baselines": {
            name: statistics.median(abs(c[name] / c["measured"] - 1) for c in cells
                                    if c[name] is not None)
            for name in _FORMS
            if any(c[name] is not None for c in cells)
        },
    }  # fmt: skip
    print("\nerrors:", summary)
    return summary
