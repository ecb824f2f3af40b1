"""Which server owns how many slices over time, with the step time below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from benchmarks.results_page.documents import Documents
from benchmarks.results_page.pictures.style import save


def draw_elastic(documents: Documents, path: Path) -> bool:
    """Servers that come, go and die.

    Returns:
        Whether there was data.
    """
    document = documents.newest("parameter_server", "elastic")
    if document is None:
        return False
    part = document.raw["elastic"]
    steps = part["results"][0]["steps"]
    start_s = steps[0][0]
    states = part["states"]
    times = [state["at"] - start_s for state in states] + [steps[-1][0] - start_s]
    loads = [state["owned_slices"] for state in states]
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(9, 4.4), height_ratios=[2, 1])
    _stack(axes[0], times, [*loads, loads[-1]])
    for what, at, _ in part["events"]:
        mark = {"add": "^", "remove": "v", "kill": "x"}[what]
        axes[0].plot(at - start_s, 1.04, mark, color="black", markersize=5, clip_on=False)
    axes[0].set_title("Slices by server; triangle up: a server comes, down: goes, x: is killed",
                      fontsize=9, pad=14)  # fmt: skip
    axes[1].plot(
        [begin - start_s for begin, _ in steps], [1e3 * s for _, s in steps], linewidth=0.6
    )
    axes[1].set_ylabel("step, ms")
    axes[1].set_xlabel("seconds of training")
    axes[1].set_yscale("log")
    save(figure, path)
    return True


def draw_rebalance(documents: Documents, path: Path) -> bool:
    """Slices that move away from a server with a slow line.

    Returns:
        Whether there was data.
    """
    document = documents.newest("parameter_server", "straggler")
    runs = None if document is None else document.raw["straggler"].get("densenet121, slow line")
    if not runs:
        return False
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(9, 4.4), height_ratios=[2, 1])
    loads = runs["balanced"]["owned_slices"]
    known = [(step, load) for step, load in enumerate(loads) if load]
    _stack(axes[0], [step for step, _ in known], [load for _, load in known])
    axes[0].set_title("Slices by server; server 1's line has a quarter of the rate", fontsize=9)
    for name in ("even", "balanced"):
        seconds = runs[name]["seconds"]
        axes[1].plot(range(len(seconds)), seconds, label=name)
    axes[1].set_ylabel("step, s")
    axes[1].set_xlabel("step")
    axes[1].set_ylim(bottom=0)
    axes[1].legend(fontsize=8)
    save(figure, path)
    return True


def _stack(axes: Any, places: Sequence[float], loads: Sequence[dict[str, int]]) -> None:
    """Shares of all slices, server on server, from each place to the next."""
    servers = sorted({server for load in loads for server in load}, key=int)
    totals = [sum(load.values()) for load in loads]
    shares = [[load.get(server, 0) / total for load, total in zip(loads, totals, strict=True)]
              for server in servers]  # fmt: skip
    colours = plt.get_cmap("tab20").colors
    axes.stackplot(places, shares, step="post", labels=[f"server {s}" for s in servers],
                   colors=[colours[int(s) % 20] for s in servers])  # fmt: skip
    axes.set_ylabel("share of slices")
    axes.set_ylim(0, 1)
    if len(servers) <= 8:
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
