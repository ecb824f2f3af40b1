"""The loss curve, in the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_MARKS = "o+"
_BOTH = "*"


def text_curve(
    series: Mapping[str, Sequence[float]], *, columns: int = 64, rows: int = 10
) -> list[str]:
    """Draws one or two curves of equal length with characters.

    Args:
        series: name and values; values that share a cell are averaged.
        columns: width of the field, without axes.
        rows: its height.

    Returns:
        Lines, the last one a legend.
    """
    length = len(next(iter(series.values())))
    columns = min(columns, length)
    curves = [
        [
            _mean(values[_cut(i, columns, length) : _cut(i + 1, columns, length)])
            for i in range(columns)
        ]
        for values in series.values()
    ]
    low = min(min(curve) for curve in curves)
    high = max(max(curve) for curve in curves)
    field = [[" "] * columns for _ in range(rows)]
    for mark, curve in zip(_MARKS, curves, strict=False):
        for column, value in enumerate(curve):
            row = round((high - value) / ((high - low) or 1.0) * (rows - 1))
            field[row][column] = mark if field[row][column] == " " else _BOTH
    lines = []
    for row, cells in enumerate(field):
        level = high - (high - low) * row / (rows - 1)
        lines.append(f"{level:6.2f} |{''.join(cells)}".rstrip())
    lines.append(" " * 7 + "+" + "-" * columns)
    lines.append(" " * 8 + "1" + f"{length}".rjust(columns - 1))
    legend = [f"{mark} {name}" for mark, name in zip(_MARKS, series, strict=False)]
    if len(series) > 1:
        legend.append(f"{_BOTH} both")
    lines.append(" " * 8 + "   ".join(legend) + "   (nats a byte, by training step)")
    return lines


def draw_curve(series: Mapping[str, Sequence[float]], png_path: Path) -> None:
    """Writes the curves as a picture; ``series`` as in ``text_curve``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    # The curves should coincide: a broad one below, a narrow dashed one above, so both show.
    styles = [("#f2a154", 4.0, "-"), ("#1f3b63", 1.2, "--")]
    for (name, values), (colour, width, line) in zip(series.items(), styles, strict=False):
        steps = range(1, len(values) + 1)
        axes.plot(steps, values, label=name, color=colour, linewidth=width, linestyle=line)
    axes.set_xlabel("training step")
    axes.set_ylabel("loss, nats a byte")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(png_path, dpi=110)


def _cut(cell: int, cells: int, length: int) -> int:
    return cell * length // cells


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
