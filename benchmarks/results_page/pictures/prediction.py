"""Predicted against measured step times."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from benchmarks.results_page.documents import Documents
from benchmarks.results_page.pictures.style import COLOURS, save

_KINDS = {"ddp": ("DDP", "ddp", "s"), "hvd_order": ("hvd_order", "hvd_order", "o")}


def draw(documents: Documents, path: Path) -> bool:
    """Draws the newest run of predict.py.

    Returns:
        Whether there was data.
    """
    for document in documents.of("simulate", "rows"):
        rows = [row for row in document.raw["rows"] if "predicted_s" in row]
        if rows:
            break
    else:
        return False
    figure, axes = plt.subplots(figsize=(5, 4.6))
    for kind, (name, colour, marker) in _KINDS.items():
        mine = [row for row in rows if row["kind"] == kind]
        axes.scatter([row["measured_s"] for row in mine], [row["predicted_s"] for row in mine],
                     color=COLOURS[colour], marker=marker, s=24, label=name, zorder=3)  # fmt: skip
    values = [row[name] for row in rows for name in ("measured_s", "predicted_s")]
    ends = [0.9 * min(values), 1.1 * max(values)]
    axes.plot(ends, ends, color="black", linewidth=1, label="equal")
    axes.fill_between(ends, [0.95 * e for e in ends], [1.05 * e for e in ends], color="0.9",
                      label="within 5 %")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set_xlabel("measured step, s")
    axes.set_ylabel("predicted step, s")
    axes.legend(fontsize=8)
    save(figure, path)
    return True
