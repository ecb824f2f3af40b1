"""What the benchmarks of predicted throughput have in common: a line, the summary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

_FORMS = ("mean_value", "bound", "fitted")


def row(cell: dict[str, Any]) -> list[str]:
    """A cell in a line, as soon as it is measured."""
    forms = [cell[name] for name in _FORMS]
    return [
        cell["model"], f"{cell['rate_mbit']:g}", cell["mode"], str(cell["workers"]),
        f"{cell['measured']:.3f}", f"{cell['predicted']:.3f}", f"{cell['error']:+.1%}",
        *("-" if x is None else f"{x:.3f}" for x in forms),
    ]  # fmt: skip


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
