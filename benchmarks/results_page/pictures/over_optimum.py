"""Step over optimum by model and system, with the interval of each median."""

from __future__ import annotations

import statistics
from pathlib import Path

from common.summary import median_interval
from matplotlib import pyplot as plt

from results_page.documents import Documents
from results_page.pictures.style import COLOURS, NAMES, save


def draw(documents: Documents, path: Path) -> bool:
    """Draws the newest run of each cell.

    Returns:
        Whether there was data.
    """
    cells = {}
    for document in documents.of("side_by_side", "cells"):
        if document.content["settings"].get("framework", "torch") == "torch":
            for cell in document.raw["cells"]:
                setting = cell["setting"]
                ratio = "" if setting["ratio"] in (1, None) else f"\nratio {setting['ratio']:g}"
                clipped = "" if setting.get("clip") is None else ", clipped"
                name = (f"{setting['model']}{clipped}\n{setting['hosts']} x "
                        f"{setting['rate_mbit']:g} Mbit/s{ratio}")  # fmt: skip
                cells.setdefault(name, cell)
    if not cells:
        return False
    systems = [s for s in NAMES if any(s in cell["systems"] for cell in cells.values())]
    width = 0.8 / len(systems)
    figure, axes = plt.subplots(figsize=(max(6.5, 1.5 * len(cells) + 3), 4.2))
    lowest = 1.0
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
        axes.bar(places, heights, width, yerr=[below, above], capsize=2, label=NAMES[system],
                 color=COLOURS[system])  # fmt: skip
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks([k + 0.4 - width / 2 for k in range(len(cells))], list(cells), fontsize=8)
    axes.set_ylabel("step / optimum")
    top = axes.get_ylim()[1]
    # Room for the legend above; a step below the optimum, as noise can make it, stays visible.
    axes.set_ylim(min(0.8, 0.95 * lowest), top + 0.15 * (top - 0.8))
    axes.legend(fontsize=8, ncols=2, loc="upper right")
    axes.set_title("Step over the optimum of any synchronous method; bars: 95 % interval",
                   fontsize=9)  # fmt: skip
    save(figure, path)
    return True
