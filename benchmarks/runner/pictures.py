"""The comparison as pictures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.runner.cell import CellResult


def draw_bars(cells: list[CellResult], path: Path) -> None:
    """Step time over optimum, a group of bars for each cell."""
    names = _names(cells)
    figure, axes = plt.subplots(figsize=(max(6.0, 1.2 * len(cells) + 3), 4))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [k + i * width for k, cell in enumerate(cells) if name in cell.systems]
        values = [c.systems[name].step_s / c.optimum_s for c in cells if name in c.systems]
        axes.bar(places, values, width, label=name)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(
        [k + 0.4 - width / 2 for k in range(len(cells))],
        [f"{c.setting.label}\n{c.setting.hosts} x {c.setting.rate_mbit:g} Mbit/s\n"
         f"ratio {c.ratio:.3g}" for c in cells], fontsize=7,
    )  # fmt: skip
    axes.set_ylabel("step time / optimum")
    axes.legend(fontsize=8)
    _save(figure, path)


def draw_efficiency(cells: list[CellResult], path: Path) -> None:
    """E over the ratio of computation to communication, one line for each system and model."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for model in dict.fromkeys(cell.setting.model for cell in cells):
        for i, name in enumerate(_names(cells)):
            points = sorted(
                (c.ratio, c.overlap(name).efficiency)
                for c in cells
                if c.setting.model == model and name in c.systems
            )
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{i}", label=f"{model}: {name}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("computation / communication")
    axes.set_ylabel("scheduling efficiency E")
    axes.legend(fontsize=7)
    _save(figure, path)


def draw_steps(cell: CellResult, path: Path) -> None:
    """One step of each system under each other: when layers ran, when the link was busy."""
    names = [name for name in cell.recorded if name != "local"]
    figure, axes = plt.subplots(len(names), 1, sharex=True, figsize=(10, 1.6 * len(names)))
    for name, at in zip(names, [axes] if len(names) == 1 else axes, strict=True):
        _draw_step(at, cell.recorded[name], cell.setting.rate_mbit)
        at.set_ylabel(name, rotation=0, ha="right", fontsize=8)
    figure.suptitle(
        f"{cell.setting.label}: rank 0, one step (blue forward, orange backward, grey: use of the "
        "link)", fontsize=9,
    )  # fmt: skip
    plt.xlabel("seconds from the start of the step")
    _save(figure, path)


def _draw_step(axes: Any, recorded: dict[str, Any], rate_mbit: float) -> None:
    for _, kind, begin, end in recorded["layers"]:
        color, lane = ("C0", 1.1) if kind == "forward" else ("C1", 1.1)
        axes.broken_barh([(begin, end - begin)], (lane, 0.8), color=color, linewidth=0.2)
    samples = recorded["sent"]
    times = [at for at, _ in samples[1:]]
    used = [8 * (b - a) / ((t - s) * rate_mbit * 1e6) for (s, a), (t, b) in pairwise(samples)]
    axes.fill_between(times, [min(1.0, u) for u in used], color="grey", step="pre")
    axes.axvline(recorded["step_s"], color="black", linewidth=1)
    axes.set_yticks([])
    axes.set_ylim(0, 2)


def _names(cells: list[CellResult]) -> list[str]:
    return [n for n in dict.fromkeys(n for c in cells for n in c.systems) if n != "local"]


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
