"""Errors of the predicted throughput by number of workers."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt

from benchmarks.results_page.documents import Documents
from benchmarks.results_page.measures import throughput_cells
from benchmarks.results_page.pictures.style import save

_MODES = {
    "async": ("asynchronous", "C0", "o"),
    "sync": ("synchronous", "C2", "^"),
    "allreduce": ("all-reduce", "C1", "s"),
}
_APART = 0.22  # of modes, on an axis on which numbers of workers are 1 apart


def draw(documents: Documents, path: Path) -> bool:
    """Draws the newest run of each cell.

    Returns:
        Whether there was data.
    """
    cells = [cell for cell, _ in throughput_cells(documents.of("prediction"))]
    if not cells:
        return False
    numbers = sorted({cell["workers"] for cell in cells})
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    axes.axhspan(-15, 15, color="0.95", label="within 15 %")
    axes.axhspan(-5, 5, color="0.88", label="within 5 %")
    axes.axhline(0, color="black", linewidth=0.8)
    for place, (mode, (name, colour, marker)) in enumerate(_MODES.items(), -1):
        mine = [cell for cell in cells if cell["mode"] == mode]
        axes.scatter(
            [numbers.index(cell["workers"]) + place * _APART for cell in mine],
            [100 * cell["error"] for cell in mine],
            color=colour, marker=marker, s=22, alpha=0.8, label=name, zorder=3,
        )  # fmt: skip
    axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    axes.set_xlabel("workers")
    axes.set_ylabel("predicted over measured, %")
    axes.set_ylim(-22, 20)
    axes.set_yticks(range(-20, 21, 5))
    axes.yaxis.set_major_formatter("{x:+.0f}")
    axes.legend(fontsize=8, ncols=2, loc="lower left")
    save(figure, path)
    return True
