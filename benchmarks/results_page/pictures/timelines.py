"""A recorded step of DDP above one of hvd_order, with the use of the link below each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from benchmarks.results_page.documents import Documents
from benchmarks.results_page.pictures.style import NAMES, save
from benchmarks.runner.cells.pictures import draw_step

_MODELS = ("densenet121", "resnet50")  # the first that is on file; its step is the shortest


def draw(documents: Documents, path: Path) -> bool:
    """Draws the newest cell that has both systems and does not clip.

    Returns:
        Whether there was data.
    """
    for model in _MODELS:
        for document in documents.of("side_by_side", "cells"):
            for cell in document.raw["cells"]:
                ddp = next((n for n in ("ddp_tuned", "ddp") if n in cell["recorded"]), None)
                wanted = cell["setting"]["model"] == model and not cell["setting"].get("clip")
                if wanted and ddp and "hvd_order" in cell["recorded"]:
                    _draw(cell, (ddp, "hvd_order"), path)
                    return True
    return False


def _draw(cell: dict[str, Any], systems: tuple[str, str], path: Path) -> None:
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(9, 3.6))
    end_s = max(cell["recorded"][system]["step_s"] for system in systems)
    for system, at in zip(systems, axes, strict=True):
        draw_step(at, cell["recorded"][system], cell["setting"]["rate_mbit"])
        at.set_title(NAMES[system], fontsize=9, loc="left")
    axes[1].set_xlim(0, 1.25 * end_s)
    axes[1].set_xlabel("seconds from the start of the step on rank 0")
    setting = cell["setting"]
    figure.suptitle(
        f"{setting['model']}, {setting['hosts']} hosts, {setting['rate_mbit']:g} Mbit/s. Blue: "
        "forward. Orange: backward. Grey: link. Black: end of the step", fontsize=9,
    )  # fmt: skip
    save(figure, path)
