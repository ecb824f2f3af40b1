"""The comparison as pictures."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from benchmarks.runner.cells.cell import CellResult


def draw_bars(groups: Mapping[str, Mapping[str, float]], label: str, path: Path) -> None:
    """A group of bars for each cell, a bar for each system; 1 is the best that can be."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    figure, axes = plt.subplots(figsize=(max(6.0, 1.2 * len(groups) + 3), 4))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [k + i * width for k, bars in enumerate(groups.values()) if name in bars]
        heights = [bars[name] for bars in groups.values() if name in bars]
        axes.bar_label(axes.bar(places, heights, width, label=name), fmt="%.2f", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks([k + 0.4 - width / 2 for k in range(len(groups))], list(groups), fontsize=7)
    axes.set_ylabel(label)
    axes.margins(y=0.15)
    axes.legend(fontsize=8)
    _save(figure, path)


def draw_steps(cell: CellResult, path: Path) -> None:
    """One step of each system under each other: when layers ran, when the link was busy."""
    names = [name for name in cell.recorded if name != "local"]
    figure, axes = plt.subplots(len(names), 1, sharex=True, figsize=(10, 1.6 * len(names)))
    for name, at in zip(names, [axes] if len(names) == 1 else axes, strict=True):
        draw_step(at, cell.recorded[name], cell.setting.rate_mbit)
        at.set_title(name, fontsize=9, loc="left")
    figure.suptitle(
        f"{cell.setting.label}: rank 0, one step (blue forward, orange backward, grey: use of the "
        "link)", fontsize=9,
    )  # fmt: skip
    plt.xlabel("seconds from the start of the step")
    _save(figure, path)


def draw_step(axes: Any, recorded: dict[str, Any], rate_mbit: float) -> None:
    """A recorded step: layers above, use of the link below."""
    for _, kind, begin, end in recorded["layers"]:
        color, lane = ("C0", 1.1) if kind == "forward" else ("C1", 1.1)
        axes.broken_barh([(begin, end - begin)], (lane, 0.8), color=color, linewidth=0.2)
    samples = recorded["sent"]
    times = [at for at, _ in samples[1:]]
    used = [8 * (b - a) / ((t - s) * rate_mbit * 1e6) for (s, a), (t, b) in pairwise(samples)]
    axes.fill_between(times, [min(1.0, u) for u in used], color="grey", step="pre")
    axes.axvline(recorded["step_s"], color="black", linewidth=1)
    axes.set_yticks([0.5, 1.5], ["link", "layers"], fontsize=8)
    axes.set_ylim(0, 2)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
