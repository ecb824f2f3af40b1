"""Draws simulated steps below each other: computation, waits and transfers.

Slices have a row each, in consumption order with the most urgent on top; buckets of DDP stand in
the order in which they are sent. A bar begins when the slice is ready (grey: it waits for its turn)
and is coloured while it travels; an outlined one belongs to the step before, and something of this
step may wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvd_order.planning.predict.simulated_step import Sent, SimulatedStep
from hvd_order.planning.report.drawing import (
    COMPUTE_COLOURS,
    MOST_LABELS,
    OUTLINE_COLOUR,
    PRIORITY_COLOURS,
    QUEUE_COLOUR,
    UPDATE_COLOUR,
    WAIT_COLOUR,
    new_figure,
    strip_frame,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_steps"]

_Corners = list[tuple[float, float]]

_LANES_IN, _ROW_IN = 0.28, 0.13
_LEAST_ROWS_IN, _MOST_ROWS_IN = 0.6, 6.0
_LINK_COLOUR = "#555555"
_MOST_OUTLINED = 400  # more outlines would be all that one sees


def draw_steps(title: str, steps: Sequence[SimulatedStep], bound_s: float) -> Figure:
    """A figure; `hvd_order.planning.report.drawing.save` writes it.

    Args:
        steps: on one scale of time, from top to bottom.
        bound_s: lower bound on the step time, drawn as a line.

    Raises:
        ImportError: matplotlib is not installed.
    """
    heights = [h for step in steps for h in (_lanes_in(step), _rows_in(step))]
    figure = new_figure(14.0, sum(heights) + 0.5 * len(steps) + 1.3)
    grid = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    axes = [row[0] for row in grid]
    for number, step in enumerate(steps):
        lanes, rows = axes[2 * number : 2 * number + 2]
        _draw_lanes(lanes, step)
        _draw_slices(rows, step)
        for each in (lanes, rows):
            each.axvline(bound_s * 1e3, color=WAIT_COLOUR, linewidth=1.0, linestyle=":")
            each.axvline(step.step_s * 1e3, color=OUTLINE_COLOUR, linewidth=1.0)
            strip_frame(each)
        lanes.set_title(
            f"{step.title}: {step.step_s * 1e3:.4g} ms", loc="left", fontsize=10, weight="bold"
        )
    axes[-1].set_xlim(0, 1.01e3 * max(step.step_s for step in steps))
    axes[-1].set_xlabel("ms from the start of the step")
    figure.suptitle(title, fontsize=12)
    _legend(figure)
    return figure


def _draw_lanes(axes: Axes, step: SimulatedStep) -> None:
    """Computation, waiting, and each link."""
    lanes = ["compute", f"wait ({step.wait_s * 1e3:.3g} ms)", *step.links]
    for phase in ("forward", "backward", "update"):
        bars = [
            (each.begin_s * 1e3, (each.end_s - each.begin_s) * 1e3)
            for each in step.busy
            if each.phase == phase
        ]
        axes.broken_barh(bars, (-0.4, 0.8), color=COMPUTE_COLOURS.get(phase, UPDATE_COLOUR))
    waits = [(wait.begin_s * 1e3, wait.length_s * 1e3) for wait in step.waits]
    axes.broken_barh(waits, (0.6, 0.8), color=WAIT_COLOUR)
    for lane, intervals in enumerate(step.links.values(), 2):
        bars = [(begin * 1e3, (end - begin) * 1e3) for begin, end in intervals]
        axes.broken_barh(bars, (lane - 0.4, 0.8), color=_LINK_COLOUR)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.tick_params(axis="x", labelbottom=False)


def _draw_slices(axes: Axes, step: SimulatedStep) -> None:
    """A row for each slice that was seen in the step."""
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection

    rows = _rows(step.sent)
    colours = colormaps[PRIORITY_COLOURS]
    outlines = len(step.sent) <= _MOST_OUTLINED
    last_ms = 1.01e3 * step.step_s
    queued: list[_Corners] = []
    travels: list[_Corners] = []
    for each in step.sent:
        ready, start, end = (
            min(max(t * 1e3, 0.0), last_ms) for t in (each.ready_s, each.started_s, each.ended_s)
        )
        queued.append(_box(ready, start, rows[each.place], 0.25))
        travels.append(_box(start, end, rows[each.place], 0.85))
    # One collection each: thousands of single bars take many seconds.
    axes.add_collection(PolyCollection(queued, facecolors=QUEUE_COLOUR))
    axes.add_collection(
        PolyCollection(
            travels,
            facecolors=[colours(rows[s.place] / max(len(rows) - 1, 1)) for s in step.sent],
            edgecolors=[OUTLINE_COLOUR if s.is_old and outlines else "none" for s in step.sent],
            linewidths=0.8,
        )
    )
    names = {rows[each.place]: each.name for each in step.sent}
    shown = range(0, len(rows), -(-len(rows) // MOST_LABELS) or 1)
    axes.set_yticks(list(shown), [names[row] for row in shown], fontsize=6)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _box(begin: float, end: float, row: int, height: float) -> _Corners:
    low, high = row - height / 2, row + height / 2
    return [(begin, low), (end, low), (end, high), (begin, high)]


def _rows(sent: Sequence[Sent]) -> dict[int, int]:
    """Row of each slice by its place in the schedule."""
    return {place: row for row, place in enumerate(sorted({each.place for each in sent}))}


def _lanes_in(step: SimulatedStep) -> float:
    return _LANES_IN * (2 + len(step.links))


def _rows_in(step: SimulatedStep) -> float:
    return min(max(_ROW_IN * len(_rows(step.sent)), _LEAST_ROWS_IN), _MOST_ROWS_IN)


def _legend(figure: Figure) -> None:
    from matplotlib import colormaps
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    urgent = colormaps[PRIORITY_COLOURS](0.0)
    figure.legend(
        handles=[
            *(
                Patch(facecolor=COMPUTE_COLOURS[name], label=name)
                for name in ("forward", "backward")
            ),
            Patch(facecolor=UPDATE_COLOUR, label="update"),
            Patch(facecolor=WAIT_COLOUR, label="waits for a transfer"),
            Patch(facecolor=QUEUE_COLOUR, label="ready, not yet sent"),
            Patch(facecolor=urgent, label="travels (dark: needed first)"),
            Patch(facecolor=urgent, edgecolor=OUTLINE_COLOUR, label="outlined: of the step before"),
            Line2D([], [], color=WAIT_COLOUR, linestyle=":", label="bound"),
        ],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
