"""Step over optimum by model and system, with the interval of each median."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from benchmarks.results_page.documents import Documents, is_by_hand
from benchmarks.results_page.pictures.style import COLOURS, NAMES, save
from benchmarks.runner.records.summary import median_interval

_IN_A_ROW = 7


def draw(documents: Documents, path: Path) -> bool:
    """Draws the newest run of each cell, seven in a row, those with clipping last.

    Returns:
        Whether there was data.
    """
    cells = _newest(documents)
    if not cells:
        return False
    systems = [s for s in NAMES if any(s in cell["systems"] for cell in cells.values())]
    names = sorted(cells, key=lambda name: ("clipped" in name, name))
    rows = -(-len(names) // _IN_A_ROW)
    figure, grid = plt.subplots(rows, figsize=(13.5, 3.1 * rows), sharey=True, squeeze=False)
    lowest = 1.0
    for number, axes in enumerate(grid[:, 0]):
        shown = names[number * _IN_A_ROW : (number + 1) * _IN_A_ROW]
        lowest = min(lowest, _draw_row(axes, {name: cells[name] for name in shown}, systems))
        axes.set_xlim(-0.3, _IN_A_ROW)  # also the last row, so that bars are alike
    top = grid[0, 0].get_ylim()[1]
    # A step below the optimum, as noise can make it, stays visible.
    grid[0, 0].set_ylim(min(0.8, 0.95 * lowest), top)
    figure.suptitle("Step over the optimum of any synchronous method; bars: 95 % interval",
                    fontsize=10)  # fmt: skip
    marks = [Patch(color=COLOURS[system], label=NAMES[system]) for system in systems]
    figure.legend(handles=marks, fontsize=8, ncols=len(systems), loc="lower center")
    figure.tight_layout(rect=(0, 0.12 / rows, 1, 1))
    save(figure, path, tight=False)
    return True


def _newest(documents: Documents) -> dict[str, dict[str, Any]]:
    cells: dict[str, dict[str, Any]] = {}
    for document in documents.of("side_by_side", "cells"):
        settings = document.content["settings"]
        if is_by_hand(document) or settings.get("framework", "torch") != "torch":
            continue
        for cell in document.raw["cells"]:
            if "auto" in cell["systems"] or "int8" in cell["systems"]:
                continue  # what fewer bytes take is not over this optimum
            setting = cell["setting"]
            ratio = "" if setting["ratio"] in (1, None) else f"\nratio {setting['ratio']:g}"
            clipped = "" if setting.get("clip") is None else ", clipped"
            name = (f"{setting['model']}{clipped}\n{setting['hosts']} x "
                    f"{setting['rate_mbit']:g} Mbit/s{ratio}")  # fmt: skip
            cells.setdefault(name, cell)
    return cells


def _draw_row(axes: Any, cells: dict[str, dict[str, Any]], systems: Sequence[str]) -> float:
    """Draws a row of cells; returns the lowest end of an interval."""
    width, lowest = 0.8 / len(systems), 1.0
    for i, system in enumerate(systems):
        places, heights, below, above = [], [], [], []
        for k, cell in enumerate(cells.values()):
            if system in cell["systems"]:
                values = [s / cell["optimum_s"] for s in cell["systems"][system]["seconds"]]
                median = statistics.median(values)
                low, high = median_interval(values)
                lowest = min(lowest, low)
                places.append(k + i * width)
                heights.append(median)
                below.append(median - low)
                above.append(high - median)
        axes.bar(places, heights, width, yerr=[below, above], capsize=2, color=COLOURS[system])
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks([k + 0.4 - width / 2 for k in range(len(cells))], list(cells), fontsize=8)
    axes.set_ylabel("step / optimum")
    return lowest
