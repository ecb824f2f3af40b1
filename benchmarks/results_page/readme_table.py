"""The README's table of step times."""

from __future__ import annotations

import statistics

from benchmarks.results_page.documents import Documents
from benchmarks.results_page.measures import CellOf
from benchmarks.results_page.page import replaced
from benchmarks.runner.records.report import table

# At most five rows, the smallest gain among them.
_ROWS = {
    ("ResNet-50", "4 hosts, 1 Gbit/s"): CellOf("resnet50", hosts=4),
    ("VGG-16", "2 hosts, 2 Gbit/s"): CellOf("vgg16", rate_mbit=2000.0),
    ("DenseNet-121", "2 hosts, 1 Gbit/s"): CellOf("densenet121"),
    ("GPT-2 small", "2 hosts, 2 Gbit/s"): CellOf("gpt2_small", rate_mbit=2000.0),
    ("DLRM, large embedding first", "2 hosts, 1 Gbit/s"): CellOf("dlrm"),
}
_HEADER = ("model", "network", "DDP, tuned", "hvd_order", "shortest possible", "DDP / hvd_order")


def readme_with_table(readme: str, documents: Documents) -> str:
    """The README with the block between the two marks made anew."""
    return replaced(readme, _table(documents))


def _table(documents: Documents) -> str:
    return "\n".join(
        table(_HEADER, [[*names, *_figures(documents, cell)] for names, cell in _ROWS.items()])
    )


def _figures(documents: Documents, wanted: CellOf) -> list[str]:
    """Seconds a step of each system and of the optimum, and the ratio of the first two."""
    found = wanted.find(documents, "ddp_tuned", "hvd_order")
    if found is None:
        raise LookupError(f"no file has a cell with tuned DDP and hvd_order: {wanted}")
    _, cell = found
    ddp, ours = (
        statistics.median(cell["systems"][system]["seconds"])
        for system in ("ddp_tuned", "hvd_order")
    )
    return [f"{ddp:.3f}", f"{ours:.3f}", f"{cell['optimum_s']:.3f}", f"{ddp / ours:.2f}"]
