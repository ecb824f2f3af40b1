"""Report and picture of the throughput that is predicted for numbers of workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, groupby
from typing import TYPE_CHECKING

from hvd_order.planning.predict.workers.comparison import Row
from hvd_order.planning.predict.workers.throughput import Throughput, saturation
from hvd_order.planning.report.drawing import new_figure, strip_frame
from hvd_order.planning.report.page import CODED_COLUMN, ReportContent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_throughput", "throughput_report"]

_COLOURS = ("#4c78a8", "#f2a154", "#59a14f", "#d62728", "#7f7f7f")
_MODES = {
    "async": "asynchronous, parameter servers",
    "sync": "synchronous, parameter servers",
    "allreduce": "all-reduce",
}


def throughput_report(
    model: str,
    rows: Sequence[Row],
    batch: int | None,
    price: float | None,
    link: str,
    sources: Sequence[str] = (),
) -> ReportContent:
    """Sums up predictions of one mode.

    Args:
        batch: samples a step of one worker; None: throughput in steps.
        price: of a worker or server for an hour; None: no costs.
        link: description of the links.
        sources: sentences on where links and costs come from.
    """
    mode = rows[0].found.mode
    unit = "steps/s" if batch is None else "samples/s"
    scale = 1 if batch is None else batch
    formula = "Pollux" if mode == "allreduce" else "Optimus"
    head = ["servers, workers", unit, "95 %", "a worker", "link busy", "mean value", "bound",
            f"{formula}, fitted"]  # fmt: skip
    what = "steps" if batch is None else "samples"
    encodes = mode == "allreduce"
    head += ["with 8 bits"] * encodes
    if price is not None:
        head.append(f"price of 1,000,000 {what}")
    table = [head]
    for row in rows:
        one = row.found
        cells = [
            f"{one.servers or '-'}, {one.workers}",
            _rate(scale * one.steps_per_s),
            f"{_rate(scale * one.low)} to {_rate(scale * one.high)}",
            _rate(scale * one.steps_per_s / one.workers),
            f"{one.server_busy:.0%}" if one.servers else "-",
            *(
                "-" if value is None else _rate(scale * value)
                for value in (row.mean_value, row.bound, row.fitted, *([row.coded] * encodes))
            ),
        ]
        if price is not None:
            hours = 1e6 / (scale * one.steps_per_s) / 3600
            cells.append(f"{price * (one.workers + one.servers) * hours:.4g}")
        table.append(cells)
    facts = [f"{_MODES[mode]}; {link}. One step is one batch of one worker.", *sources]
    facts += [*_bounded(rows), *_knees(rows)]
    facts.append(
        f"95 %: interval of the mean over random draws. Mean value, bound: without overlap within "
        f"a step. {formula}: fitted to the predictions for up to 4 workers."
    )
    if encodes:
        facts.append(CODED_COLUMN)
    return ReportContent(f"{model}: predicted throughput", facts, table, [])


def _bounded(rows: Sequence[Row]) -> Iterator[str]:
    """What a delay bound does, in the job in which it does most."""
    late = max((row.found for row in rows), key=lambda one: one.late)
    if late.late > 0:
        yield f"Delay bound: with {_job(late)} {late.late:.1%} of the updates were not sent."
    helped = max((row.found for row in rows), key=lambda one: one.aggregated)
    if helped.aggregated > 0:
        yield (
            f"Aggregation: with {_job(helped)} {helped.aggregated:.0%} of the updates were added "
            "up by helpers."
        )


def _job(one: Throughput) -> str:
    return (
        f"{one.servers} server{'s' * (one.servers != 1)} and {one.workers} "
        f"worker{'s' * (one.workers != 1)}"
    )


def _knees(rows: Sequence[Row]) -> Iterator[str]:
    """For each number of servers: from how many workers on more of them gain nothing."""
    for servers, some in _by_servers(rows):
        found = [row.found for row in some]
        if len(found) < 2:
            continue
        enough = saturation(found)
        with_them = f"With {servers} server{'s' * (servers != 1)} " if servers else ""
        count = f"{enough.workers} worker{'s' * (enough.workers != 1)}"
        if enough.workers == found[-1].workers:
            text = f"{count} still gain"
        else:
            text = f"more than {count} gain less than 5 %"
        text = f"{with_them}{text}."
        yield text[0].upper() + text[1:]


def _by_servers(rows: Sequence[Row]) -> Iterator[tuple[int, list[Row]]]:
    for servers, some in groupby(rows, key=lambda row: row.found.servers):
        yield servers, list(some)


def draw_throughput(title: str, rows: Sequence[Row], batch: int | None) -> Figure:
    """Throughput by number of workers, a line for each number of servers, with intervals.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    scale = 1 if batch is None else batch
    for (servers, some), colour in zip(_by_servers(rows), cycle(_COLOURS), strict=False):
        found = [row.found for row in some]
        workers = [one.workers for one in found]
        name = f"{servers} server{'s' * (servers != 1)}" if servers else "all-reduce"
        axes.plot(
            workers, [scale * o.steps_per_s for o in found], "o-", color=colour, label=name, ms=4
        )
        axes.fill_between(
            workers, [scale * o.low for o in found], [scale * o.high for o in found],
            color=colour, alpha=0.25, lw=0,
        )  # fmt: skip
        bounds = [row.bound for row in some if row.bound is not None]
        if bounds:
            axes.plot(
                workers, [scale * bound for bound in bounds], ":", color=colour,
                label=f"{name}: bound without overlap",
            )  # fmt: skip
        enough = saturation(found)
        if enough.workers != workers[-1]:
            axes.annotate(
                f"{enough.workers}", (enough.workers, scale * enough.steps_per_s),
                xytext=(0, 8), textcoords="offset points", ha="center", color=colour,
            )  # fmt: skip
    axes.set_xlabel("workers (a number marks where more gain less than 5 %)")
    axes.set_ylabel("steps/s" if batch is None else "samples/s")
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    strip_frame(axes)
    return figure


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
