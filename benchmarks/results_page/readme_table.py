"""The README's table of step times."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.results_page.documents import Documents
from benchmarks.results_page.measures import CellOf
from benchmarks.results_page.page import replaced
from benchmarks.runner.records.report import table

_WORDS = ("none", "one", "two", "three", "four", "five", "six")
_TUNED, _DEFAULT = "best of five", "default 25 MiB"
_HEADER = ("model, hosts, network", "DDP", "DDP's buckets", "Horovod", "hvd_order", "optimum",
           "commit")  # fmt: skip


@dataclass(frozen=True)
class _Row:
    """A cell, and its last figures from the time before data was kept (HISTORY.md)."""

    text: str
    cell: CellOf
    last: tuple[str, str, str, str, str, str]


_ROWS = [
    _Row("ResNet-50, 2, 1 Gbit/s", CellOf("resnet50"),
         ("1.180", _TUNED, "1.221", "0.923", "0.914", "75549d8")),
    _Row("ResNet-50, 4, 1 Gbit/s", CellOf("resnet50", hosts=4),
         ("1.765", _TUNED, "", "1.376", "1.347", "4e0eb44")),
    _Row("ResNet-50, 8, 200 Mbit/s", CellOf("resnet50", 8, 200.0),
         ("10.342", _DEFAULT, "", "7.627", "7.574", "75225fc")),
    _Row("DenseNet-121, 2, 1 Gbit/s", CellOf("densenet121"),
         ("0.389", _TUNED, "", "0.333", "0.318", "4e0eb44")),
    _Row("DLRM with its large embedding in front, 2, 1 Gbit/s", CellOf("dlrm"),
         ("1.794", _TUNED, "", "1.796", "1.779", "75225fc")),
    _Row("VGG-16, 2, 2 Gbit/s", CellOf("vgg16", rate_mbit=2000.0),
         ("3.162", _TUNED, "", "2.425", "2.384", "4e0eb44")),
    _Row("GPT-2 small, 2, 2 Gbit/s", CellOf("gpt2_small", rate_mbit=2000.0),
         ("3.251", _TUNED, "", "2.906", "2.843", "4e0eb44")),
]  # fmt: skip


def readme_with_table(readme: str, documents: Documents) -> str:
    """The README with the block between the two marks made anew."""
    return replaced(readme, _table(documents))


def _table(documents: Documents) -> str:
    rows = [[row.text, *_bold(_figures(documents, row))] for row in _ROWS]
    return "\n".join(table(_HEADER, rows))


def _figures(documents: Documents, row: _Row) -> tuple[str, ...]:
    for ddp, buckets in (("ddp_tuned", _TUNED), ("ddp", _DEFAULT)):
        found = row.cell.find(documents, ddp, "hvd_order")
        if found is not None:
            document, cell = found
            tried = document.content["settings"].get("buckets_mib")
            if ddp == "ddp_tuned" and tried is not None:
                buckets = f"best of {_WORDS[len(tried)]}"
            return (
                _step(cell, ddp), buckets, _step(cell, "horovod"), _step(cell, "hvd_order"),
                f"{cell['optimum_s']:.3f}", document.commit,
            )  # fmt: skip
    return row.last


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
