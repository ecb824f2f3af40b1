"""The README's table of step times."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.results_page.documents import Documents
from benchmarks.results_page.measures import CellOf
from benchmarks.results_page.page import replaced
from benchmarks.runner.records.report import table

_WORDS = ("none", "one", "two", "three", "four", "five", "six")
_TUNED, _DEFAULT = "best of five", "default 25 MiB"
_HEADER = ("model, hosts, network", "DDP", "DDP's buckets", "Horovod", "hvd_order", "optimum",
           "commit")  # fmt: skip


_ROWS = {
    "ResNet-50, 2, 1 Gbit/s": CellOf("resnet50"),
    "ResNet-50, 4, 1 Gbit/s": CellOf("resnet50", hosts=4),
    "ResNet-50, 8, 200 Mbit/s": CellOf("resnet50", 8, 200.0),
    "DenseNet-121, 2, 1 Gbit/s": CellOf("densenet121"),
    "DLRM with its large embedding in front, 2, 1 Gbit/s": CellOf("dlrm"),
    "VGG-16, 2, 2 Gbit/s": CellOf("vgg16", rate_mbit=2000.0),
    "GPT-2 small, 2, 2 Gbit/s": CellOf("gpt2_small", rate_mbit=2000.0),
}


def readme_with_table(readme: str, documents: Documents) -> str:
    """The README with the block between the two marks made anew."""
    return replaced(readme, _table(documents))


def _table(documents: Documents) -> str:
    rows = [[text, *_bold(_figures(documents, cell))] for text, cell in _ROWS.items()]
    return "\n".join(table(_HEADER, rows))


def _figures(documents: Documents, wanted: CellOf) -> tuple[str, ...]:
    for ddp, buckets in (("ddp_tuned", _TUNED), ("ddp", _DEFAULT)):
        found = wanted.find(documents, ddp, "hvd_order")
        if found is not None:
            document, cell = found
            tried = document.content["settings"].get("buckets_mib")
            if ddp == "ddp_tuned" and tried is not None:
                buckets = f"best of {_WORDS[len(tried)]}"
            return (
                _step(cell, ddp), buckets, _step(cell, "horovod"), _step(cell, "hvd_order"),
                f"{cell['optimum_s']:.3f}", document.commit,
            )  # fmt: skip
    raise LookupError(f"no file has a cell with DDP and hvd_order: {wanted}")


def _step(cell: dict[str, Any], system: str) -> str:
    measured = cell["systems"].get(system)
    return "" if measured is None else f"{statistics.median(measured['seconds']):.3f}"


def _bold(figures: tuple[str, ...]) -> list[str]:
    """The shorter of DDP's and hvd_order's steps, where they differ by more than 1 %."""
    ddp, ours = float(figures[0]), float(figures[3])
    cells = list(figures)
    if abs(ours / ddp - 1) > 0.01:
        shorter = 0 if ddp < ours else 3
        cells[shorter] = f"**{cells[shorter]}**"
    return cells
