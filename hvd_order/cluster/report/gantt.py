"""Draws runs below each other: a row for each machine, coloured by job, and the use of resources.

The height of a job's bar is its part of the machine's GPUs, or of its first resource if it has
none. A job has the same colour in all runs. Runs with too many bars to tell apart show how full
each machine is instead.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.report.lanes import LaneBox, boxes_of
from hvd_order.cluster.report.occupancy import Occupancy, main_resources
from hvd_order.cluster.report.units import time_unit
from hvd_order.planning.report.drawing import MOST_LABELS, OUTLINE_COLOUR, new_figure, strip_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_machines"]

_WIDTH_IN = 14.0
_AXES_IN = 12.3  # of it for time, about
_USE_IN = 0.9
_ROW_IN, _MOST_ROW_IN = 0.3, 1.0
_FEW_ROWS_IN, _MOST_ROWS_IN = 4.0, 7.5  # what few machines get at most, and what all do
_MOST_ROWS = 150  # of single jobs
_FEW_JOBS = 20  # have a legend
_FEW_BARS = 400  # have outlines
_MOST_NAMES = 200
_CHARACTER_IN, _TEXT_IN = 0.065, 0.09
_FEW_COLOURS = ("#4c78a8", "#f2a154", "#59a14f", "#d62728", "#9d75b5", "#8c6d52", "#e58fb8",
                "#6f6f6f", "#c5b300", "#3aa6b9")  # fmt: skip
_USE_COLOURS = ("#4c78a8", "#f2a154", "#59a14f", "#d62728", "#7f7f7f")
_GOLDEN = 0.618033988749895
_Corners = list[tuple[float, float]]
_Edges = tuple[float, float, float, float]  # left, upper, right, lower; machines count downwards


def draw_machines(
    title: str, machines: Machines, runs: Mapping[str, Occupancy], subtitles: Mapping[str, str]
) -> Figure:
    """A figure; `hvd_order.planning.report.drawing.save` writes it.

    Args:
        runs: from top to bottom by name, all over the same time.
        subtitles: what is written above a run, by its name.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows_in = max(min(_MOST_ROW_IN * len(machines), _FEW_ROWS_IN), _ROW_IN * len(machines))
    rows_in = min(rows_in, _MOST_ROWS_IN)
    figure = new_figure(_WIDTH_IN, len(runs) * (rows_in + _USE_IN + 0.6) + 1.2)
    heights = [rows_in, _USE_IN] * len(runs)
    grid = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    span_s = max((run.end_s - run.begin_s for run in runs.values()), default=0.0)
    unit, unit_s = time_unit(span_s)
    colours = _colours(runs.values())
    for number, (name, run) in enumerate(runs.items()):
        rows, use = grid[2 * number][0], grid[2 * number + 1][0]
        if run.bars is None or len(machines) > _MOST_ROWS:
            _draw_shares(rows, run, unit_s)
            rows.set_ylabel("dark: in use", fontsize=8)
        else:
            _draw_jobs(rows, run, machines, colours, unit_s, rows_in)
            shown = " or ".join(dict.fromkeys(filter(None, main_resources(machines))))
            rows.set_ylabel(f"height: {shown} of a job", fontsize=8)
        _name_rows(rows, machines)
        _draw_use(use, run, unit_s)
        rows.set_title(subtitles[name], loc="left", fontsize=10, weight="bold")
        rows.tick_params(axis="x", labelbottom=False)
        for axes in (rows, use):
            strip_frame(axes)
    last = grid[-1][0]
    first = next(iter(runs.values()))
    if span_s > 0:
        # From 0, unless the trace begins so late that nothing could be seen.
        left_s = 0.0 if first.begin_s <= 0.1 * span_s else first.begin_s
        last.set_xlim(left_s / unit_s, (first.begin_s + 1.005 * span_s) / unit_s)
    last.set_xlabel(f"time, {unit}")
    figure.suptitle(title, fontsize=12)
    _legend(figure, runs, colours)
    return figure


def _draw_jobs(
    axes: Axes,
    run: Occupancy,
    machines: Machines,
    colours: Mapping[str, str],
    unit_s: float,
    rows_in: float,
) -> None:
    from matplotlib.collections import PolyCollection

    bars = run.bars or []
    capacities = [
        machine.capacity.get(name, 0.0)
        for machine, name in zip(machines.machines, main_resources(machines), strict=True)
    ]
    boxes = boxes_of(bars, capacities)
    corners = [_corners(box, capacities[box.bar.machine], unit_s) for box in boxes]
    outlined = len(boxes) <= _FEW_BARS
    # One collection: thousands of single bars take many seconds.
    axes.add_collection(
        PolyCollection(
            corners,
            facecolors=[colours[box.bar.job] for box in boxes],
            edgecolors="white" if outlined else "none",
            linewidths=0.6 if outlined else 0.0,
        )
    )
    scales = (_AXES_IN * unit_s / max(run.end_s - run.begin_s, 1e-300), rows_in / len(machines))
    for box, (left, low, right, high) in _labelled(boxes, map(_edges, corners), scales):
        axes.text((left + right) / 2, (low + high) / 2, box.bar.job, fontsize=6, ha="center",
                  va="center", color=_readable_on(colours[box.bar.job]), clip_on=True)  # fmt: skip


def _labelled(
    boxes: Iterable[LaneBox], edges: Iterable[_Edges], scales: tuple[float, float]
) -> list[tuple[LaneBox, _Edges]]:
    """The largest boxes that have room for their job's name."""
    found = []
    for box, at in zip(boxes, edges, strict=True):
        wide_in, high_in = (at[2] - at[0]) * scales[0], (at[3] - at[1]) * scales[1]
        if wide_in >= _CHARACTER_IN * (len(box.bar.job) + 1) and high_in >= _TEXT_IN:
            found.append((wide_in * high_in, (box, at)))
    found.sort(key=lambda each: -each[0])
    return [each for _, each in found[:_MOST_NAMES]]


def _corners(box: LaneBox, capacity: float, unit_s: float) -> _Corners:
    """The lowest part of a machine is drawn at the lower edge of its row."""
    height = 0.9
    bottom = box.bar.machine + height / 2
    low, high = (bottom - height * part / capacity for part in (box.low, box.high))
    left, right = box.bar.begin_s / unit_s, box.bar.end_s / unit_s
    return [(left, low), (right, low), (right, high), (left, high)]


def _edges(corners: _Corners) -> _Edges:
    (left, low), _, (right, high), _ = corners
    return left, high, right, low


def _draw_shares(axes: Axes, run: Occupancy, unit_s: float) -> None:
    axes.imshow(
        run.shares, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="antialiased",
        extent=(run.begin_s / unit_s, run.end_s / unit_s, len(run.shares) - 0.5, -0.5),
    )  # fmt: skip


def _name_rows(axes: Axes, machines: Machines) -> None:
    count = len(machines)
    shown = range(0, count, -(-count // MOST_LABELS))
    axes.set_yticks(list(shown), [machines.machines[i].name for i in shown], fontsize=7)
    axes.set_ylim(count - 0.5, -0.5)


def _draw_use(axes: Axes, run: Occupancy, unit_s: float) -> None:
    for (name, shares), colour in zip(run.use.items(), _repeated(len(run.use)), strict=True):
        width_s = (run.end_s - run.begin_s) / max(len(shares), 1)
        times = [(run.begin_s + i * width_s) / unit_s for i in range(len(shares) + 1)]
        axes.stairs(shares, times, color=colour, linewidth=1.0, label=name)
    axes.set_ylim(0, 1.05)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"], fontsize=7)
    axes.set_ylabel("in use", fontsize=8)
    if len(run.use) > 1:
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _repeated(count: int) -> list[str]:
    return [_USE_COLOURS[i % len(_USE_COLOURS)] for i in range(count)]


def _colours(runs: Iterable[Occupancy]) -> dict[str, str]:
    """A colour for each job, in the order in which jobs begin in the first run that has them."""
    names: dict[str, None] = {}
    for run in runs:
        for bar in sorted(run.bars or [], key=lambda b: (b.begin_s, b.machine)):
            names.setdefault(bar.job)
    if len(names) <= len(_FEW_COLOURS):
        return dict(zip(names, _FEW_COLOURS, strict=False))
    return {name: _hue(number) for number, name in enumerate(names)}


def _hue(number: int) -> str:
    """Hues far apart for jobs that follow one another."""
    lightness = (0.42, 0.55, 0.68)[number % 3]
    red, green, blue = colorsys.hls_to_rgb((number * _GOLDEN) % 1.0, lightness, 0.5)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _readable_on(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 150 else OUTLINE_COLOUR


def _legend(figure: Figure, runs: Mapping[str, Occupancy], colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    if 0 < len(colours) <= _FEW_JOBS:
        handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=10, frameon=False,
                      fontsize=8)  # fmt: skip
