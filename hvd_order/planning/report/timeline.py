"""Draws one rank's timeline: its computation, waits and transfers of slices.

The slices stand in consumption order, most urgent on top, one row each. Backward makes them ready
from the bottom upwards; where order works, the bars of the top rows come first all the same, and
the lower rows still travel (dark outline) while the next forward runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.report.drawing import (
    COMPUTE_COLOURS,
    MOST_LABELS,
    OTHER_COLOUR,
    OUTLINE_COLOUR,
    PRIORITY_COLOURS,
    QUEUE_COLOUR,
    UPDATE_COLOUR,
    WAIT_COLOUR,
    new_figure,
    save,
    strip_frame,
)
from hvd_order.planning.report.trace_file import RankTimeline, TracedSlice, TracedSpan, read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DEFAULT_STEPS = 2
_LONG = 120  # characters of a title on one line

_Row = tuple[int, int]  # (model, slice)


@dataclass(frozen=True)
class _Window:
    """The stretch of the trace that is drawn; microseconds on the clock of the trace."""

    begin_us: float
    end_us: float
    steps: tuple[int, ...]

    def shows(self, span: TracedSpan) -> bool:
        return span.end_us >= self.begin_us and span.begin_us <= self.end_us

    def ms(self, time_us: float) -> float:
        """Milliseconds since the left edge, kept inside the picture."""
        return (min(max(time_us, self.begin_us), self.end_us) - self.begin_us) / 1000.0


def draw_timeline(
    trace_path: str | Path,
    png_path: str | Path,
    steps: Sequence[int] | None = None,
    *,
    rank: int | None = None,
) -> str:
    """Reads a trace and writes its picture.

    Args:
        trace_path: a Chrome trace, as ``hvd.start_timeline`` writes it.
        png_path: where the picture goes; the folder is made if it is missing.
        steps: training steps to draw, all that lie between the first and the last of them
            included; by default two steps from the end of the trace that are complete.
        rank: whose timeline to draw; by default the lowest in the trace.

    Returns:
        What is in it, in a sentence: the title.

    Raises:
        InvalidUsage: the trace is not readable, holds no transfers or lacks a step asked for.
    """
    trace = read_trace(trace_path, rank)
    window = _window(trace, _chosen_steps(trace, steps))
    rows = _rows(trace, window)
    late = _arriving_in_next_forward(trace)

    figure, top, bottom = _canvas(len(rows))
    _draw_training_thread(top, trace, window)
    _draw_slices(figure, bottom, trace, window, rows, late)
    _draw_steps(top, bottom, trace, window)
    title = _title(trace, window, late)
    figure.suptitle(title.replace("; ", ";\n", 1) if len(title) > _LONG else title, fontsize=12)

    save(figure, png_path)
    return title


# --- what to draw ------------------------------------------------------------------------------


def _chosen_steps(trace: RankTimeline, wanted: Sequence[int] | None) -> tuple[int, ...]:
    present = trace.steps()
    if wanted is None:
        whole = present[:-1] if len(present) > _DEFAULT_STEPS else present
        return tuple(whole[-_DEFAULT_STEPS:])
    missing = sorted(set(wanted) - set(present))
    if missing or not wanted:
        raise InvalidUsage(
            f"the trace has no transfers of steps {missing}; it holds steps "
            f"{present[0]} to {present[-1]}"
            if missing
            else "no steps to draw; leave steps out to draw the last complete ones"
        )
    return tuple(sorted(set(wanted)))


def _window(trace: RankTimeline, steps: tuple[int, ...]) -> _Window:
    first, last = steps[0], steps[-1]
    ready_us = min(event.begin_us for event in _of_step(trace, first))
    done_us = max(event.end_us for event in _of_step(trace, last))
    before = [span.begin_us for span in _forwards(trace) if span.begin_us <= ready_us]
    after = _next_forward(trace, last)
    return _Window(
        begin_us=max(before, default=ready_us),
        end_us=max(done_us, after.end_us) if after else done_us,
        steps=steps,
    )


def _of_step(trace: RankTimeline, step: int) -> list[TracedSlice]:
    return [event for event in (*trace.queued, *trace.transfers) if event.step == step]


def _forwards(trace: RankTimeline) -> list[TracedSpan]:
    return [span for span in trace.compute if span.name == "forward"]


def _next_forward(trace: RankTimeline, step: int) -> TracedSpan | None:
    """The forward pass that comes after the last gradient of ``step`` was ready."""
    last_ready_us = max(
        event.begin_us for event in trace.queued or trace.transfers if event.step == step
    )
    later = [span for span in _forwards(trace) if span.begin_us >= last_ready_us]
    return later[0] if later else None


def _arriving_in_next_forward(trace: RankTimeline) -> frozenset[TracedSlice]:
    """Transfers that plain DDP would have waited for before it began the next forward."""
    starts = {step: _next_forward(trace, step) for step in trace.steps()}
    return frozenset(
        transfer
        for transfer in trace.transfers
        if (start := starts[transfer.step]) is not None and transfer.end_us > start.begin_us
    )


def _rows(trace: RankTimeline, window: _Window) -> dict[_Row, int]:
    """Place of each slice in the picture: models one below the other, urgent slices on top."""
    shown = {
        (event.model, event.priority, event.slice)
        for event in (*trace.queued, *trace.transfers)
        if window.shows(event)
    }
    return {(model, slice_): place for place, (model, _, slice_) in enumerate(sorted(shown))}


# --- drawing -----------------------------------------------------------------------------------


def _canvas(rows: int) -> tuple[Figure, Axes, Axes]:
    slices_in = min(max(0.17 * rows, 3.0), 13.0)
    training_in = 1.1
    figure = new_figure(15.0, slices_in + training_in + 1.9)
    top, bottom = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [training_in, slices_in]}
    )
    return figure, top, bottom


def _draw_training_thread(axes: Axes, trace: RankTimeline, window: _Window) -> None:
    """Three rows of the thread that trains: compute, update, wait."""
    for span in filter(window.shows, trace.compute):
        colour = COMPUTE_COLOURS.get(span.name, OTHER_COLOUR)
        _bars(axes, [span], window, [0], 0.8, colour)
        width_ms = window.ms(span.end_us) - window.ms(span.begin_us)
        if width_ms > 0.05 * window.ms(window.end_us):
            centre = window.ms(span.begin_us) + width_ms / 2
            axes.text(centre, 0, span.name, ha="center", va="center", color="white", fontsize=9)
    updates = list(filter(window.shows, trace.updates))
    waits = list(filter(window.shows, trace.waits))
    _bars(axes, updates, window, [1] * len(updates), 0.8, UPDATE_COLOUR)
    _bars(axes, waits, window, [2] * len(waits), 0.8, WAIT_COLOUR)
    axes.set_yticks(
        [0, 1, 2],
        ["compute", f"update ({_total_ms(updates):.1f} ms)", f"wait ({_total_ms(waits):.1f} ms)"],
    )
    axes.set_ylim(2.6, -0.6)
    axes.tick_params(axis="x", labelbottom=False)
    strip_frame(axes)


def _draw_slices(
    figure: Figure,
    axes: Axes,
    trace: RankTimeline,
    window: _Window,
    rows: Mapping[_Row, int],
    late: frozenset[TracedSlice],
) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Patch

    queued = list(filter(window.shows, trace.queued))
    transfers = list(filter(window.shows, trace.transfers))
    lowest = max((event.priority for event in transfers), default=0) or 1
    colours = colormaps[PRIORITY_COLOURS]
    _bars(axes, queued, window, [_place(rows, event) for event in queued], 0.22, QUEUE_COLOUR)
    for outlined in (False, True):
        some = [event for event in transfers if (event in late) is outlined]
        _bars(
            axes,
            some,
            window,
            [_place(rows, event) for event in some],
            0.82,
            [colours(event.priority / lowest) for event in some],
            OUTLINE_COLOUR if outlined else None,
        )
    _label_rows(axes, [*queued, *transfers], rows)
    axes.set_xlim(0, window.ms(window.end_us))
    axes.set_xlabel("ms")
    strip_frame(axes)
    scale = figure.colorbar(
        ScalarMappable(Normalize(0, lowest), colours), ax=figure.axes, pad=0.01, aspect=40
    )
    scale.ax.invert_yaxis()
    scale.set_label("priority (0 is needed first)")
    figure.legend(
        handles=[
            Patch(facecolor=QUEUE_COLOUR, label="ready, not yet sent"),
            Patch(facecolor=colours(0.0), label="travels"),
            Patch(
                facecolor=colours(0.0),
                edgecolor=OUTLINE_COLOUR,
                linewidth=1.4,
                label="arrives after the next forward has begun",
            ),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )


def _draw_steps(top: Axes, bottom: Axes, trace: RankTimeline, window: _Window) -> None:
    """Tints forward and backward behind the slices and marks where a step begins."""
    for span in filter(window.shows, trace.compute):
        if span.name in ("forward", "backward"):
            bottom.axvspan(
                window.ms(span.begin_us),
                window.ms(span.end_us),
                color=COMPUTE_COLOURS[span.name],
                alpha=0.09,
                linewidth=0,
                zorder=0,
            )
    for step in trace.steps():
        forward = _next_forward(trace, step)
        if forward is None or not window.shows(forward):
            continue
        for axes in (top, bottom):
            axes.axvline(window.ms(forward.begin_us), color="#555555", linewidth=0.8, linestyle=":")


def _title(trace: RankTimeline, window: _Window, late: frozenset[TracedSlice]) -> str:
    first, last = window.steps[0], window.steps[-1]
    sent = [transfer for transfer in trace.transfers if first <= transfer.step <= last]
    crossing = sum(transfer in late for transfer in sent)
    open_ended = [step for step in window.steps if _next_forward(trace, step) is None]
    overlap = f"{crossing} of them arrive after the next forward has begun"
    if len(open_ended) == len(window.steps):
        overlap = (
            "no forward pass is recorded after them, so what overlaps is unknown; stop the "
            'recording a step later, or mark forward passes by with hvd.timeline_span("forward"):'
        )
    elif open_ended:
        overlap += f"; none is recorded after step {open_ended[-1]}"
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    sent_mib = sum(transfer.bytes for transfer in sent) / 2**20
    return f"rank {trace.rank}, {which}: {len(sent)} slices, {sent_mib:.1f} MiB; {overlap}"


def _bars(
    axes: Axes,
    spans: Sequence[TracedSpan],
    window: _Window,
    places: Sequence[int],
    height: float,
    colour: object,
    outline: str | None = None,
) -> None:
    if not spans:
        return
    left = [window.ms(span.begin_us) for span in spans]
    width = [window.ms(span.end_us) - begin for span, begin in zip(spans, left, strict=True)]
    axes.barh(
        list(places),
        width,
        left=left,
        height=height,
        color=colour,
        edgecolor=outline,
        linewidth=1.1 if outline else 0,
        zorder=2,
    )


def _label_rows(axes: Axes, events: Iterable[TracedSlice], rows: Mapping[_Row, int]) -> None:
    names = {_place(rows, event): event.name for event in events}
    models = {model for model, _ in rows}
    owner = {place: model for (model, _), place in rows.items()}
    stride = -(-len(rows) // MOST_LABELS)
    places = range(0, len(rows), stride)
    axes.set_yticks(
        list(places),
        [
            f"{f'model {owner[place]}: ' if len(models) > 1 else ''}{names[place]}"
            for place in places
        ],
        fontsize=8,
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _place(rows: Mapping[_Row, int], event: TracedSlice) -> int:
    return rows[event.model, event.slice]


def _total_ms(spans: Iterable[TracedSpan]) -> float:
    return sum(span.duration_us for span in spans) / 1000.0
