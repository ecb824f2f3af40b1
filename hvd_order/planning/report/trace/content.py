"""What the report about a timeline says, whatever its format."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hvd_order.planning.report.page import counted, ms_text, table_lines
from hvd_order.planning.report.trace.exposed import ExposedWait, exposed_waits, layer_of
from hvd_order.planning.report.trace.suggestions import Suggestions, step_s, suggest
from hvd_order.planning.report.trace_file import TracedJob

__all__ = ["BECAUSE", "LayerBar", "Table", "TraceReport", "report_of", "text_of"]

BECAUSE = "because"
"""Heading of a column of sentences."""

_MOST_LAYERS = 20
_MOST_BLOCKED = 12
_MOST_NAMED = 3
_WORTH_A_WORD = 0.1  # of a wait: a cause of less is not named


@dataclass(frozen=True)
class LayerBar:
    """A layer's exposed time in one step; mean of the ranks, in milliseconds.

    Attributes:
        unknown: waits of which the trace does not say for what, such as for norms.
    """

    layer: str
    late: float
    queue: float
    transfer: float
    unknown: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.late + self.queue + self.transfer + self.unknown


@dataclass(frozen=True)
class Table:
    """Rows of text, the header first, and what they are about."""

    caption: str
    rows: list[list[str]]


@dataclass(frozen=True)
class TraceReport:
    """The content.

    Attributes:
        facts: sentences.
        bars: the layers, the longest exposed first; as a table they are ``tables[0]``.
        tables: all of them.
        suggestions: sentences, the largest gain first.
    """

    title: str
    facts: list[str]
    bars: list[LayerBar]
    tables: list[Table]
    suggestions: list[str]


def report_of(job: TracedJob, name: str) -> TraceReport:
    """Returns the report about a timeline.

    Args:
        name: of the file.
    """
    waits = exposed_waits(job)
    steps = max(len(timeline.steps()) for timeline in job.ranks.values())
    share = len(job.ranks) * max(steps, 1)
    bars = _bars(waits, share)
    outcome = suggest(job)
    return TraceReport(
        f"What held up {name}",
        list(_facts(job, bars, steps, outcome)),
        bars,
        [_layer_table(bars), _rank_table(job, waits, steps), _blocked_table(waits)],
        list(_suggestions(outcome)),
    )


def text_of(report: TraceReport) -> str:
    """Formats a report for a terminal."""
    lines = [report.title, "", *report.facts]
    for table in report.tables:
        lines += ["", table.caption, *(_lines(table) if len(table.rows) > 1 else ["none"])]
    lines += ["", "What would help, by the simulator", *report.suggestions]
    return "\n".join(lines) + "\n"


def _lines(table: Table) -> Iterator[str]:
    """The rows in columns; a last column of sentences is not adjusted."""
    if table.rows[0][-1] != BECAUSE:
        yield from table_lines(table.rows)
        return
    columns = table_lines([row[:-1] for row in table.rows])
    for line, row in zip(columns, table.rows, strict=True):
        yield f"{line}  {row[-1]}"


def _bars(waits: Iterable[ExposedWait], share: int) -> list[LayerBar]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for each in waits:
        of = sums[layer_of(each.wait.name)]
        if each.parts is None:
            of[3] += each.us
        else:
            of[0] += each.parts.late
            of[1] += each.parts.queue
            of[2] += each.parts.transfer
    bars = [LayerBar(layer, *(us / 1e3 / share for us in of)) for layer, of in sums.items()]
    return sorted(bars, key=lambda bar: -bar.total)


def _facts(
    job: TracedJob, bars: Sequence[LayerBar], steps: int, outcome: Suggestions
) -> Iterator[str]:
    yield (
        f"{counted(len(job.ranks), 'rank')}, {counted(steps, 'step')}"
        + ("" if outcome.measured_s is None else f" of {ms_text(outcome.measured_s)}")
        + f". Exposed communication: {sum(bar.total for bar in bars):.2f} ms of each step."
    )
    if job.clock_error_us is not None:
        yield f"Times of different ranks differ by {job.clock_error_us / 1e3:.3g} ms at most."
    if len(job.ranks) == 1:
        yield (
            "The file has one rank, so a late rank cannot be told from a transfer; record all "
            "ranks into one file (a path without {rank})."
        )
    yield (
        "late: a rank had not computed the gradient yet. queue: all had, and other slices were "
        "sent first. transfer: the slice travelled."
    )


def _layer_table(bars: Sequence[LayerBar]) -> Table:
    has_unknown = any(bar.unknown for bar in bars)
    head = ["layer", "late", "queue", "transfer"] + ["other"] * has_unknown + ["sum"]
    rows = [head]
    shown = list(bars[:_MOST_LAYERS])
    rest = bars[_MOST_LAYERS:]
    if rest:
        shown.append(LayerBar(
            f"{len(rest)} more",
            *(sum(values) for values in zip(
                *((b.late, b.queue, b.transfer, b.unknown) for b in rest), strict=True
            )),
        ))  # fmt: skip
    for bar in shown:
        values = [bar.late, bar.queue, bar.transfer] + [bar.unknown] * has_unknown + [bar.total]
        rows.append([bar.layer, *(f"{value:.2f}" for value in values)])
    return Table("Exposed time by layer and cause, ms of each step, mean of the ranks", rows)


def _rank_table(job: TracedJob, waits: Sequence[ExposedWait], steps: int) -> Table:
    blamed: dict[int, float] = defaultdict(float)
    waited: dict[int, float] = defaultdict(float)
    for each in waits:
        waited[each.rank] += each.us
        if each.parts is not None and each.late_rank not in (-1, each.rank):
            blamed[each.late_rank] += each.parts.late
    rows = [["rank", "step", "backward pass", "waited", "made others wait"]]
    for rank, timeline in job.ranks.items():
        backward = [span.duration_us for span in timeline.compute if span.name == "backward"]
        step = step_s(timeline)
        rows.append([
            str(rank),
            "-" if step is None else f"{step * 1e3:.2f}",
            f"{statistics.median(backward) / 1e3:.2f}" if backward else "-",
            f"{waited[rank] / 1e3 / max(steps, 1):.2f}",
            f"{blamed[rank] / 1e3 / max(steps, 1):.2f}",
        ])  # fmt: skip
    return Table(
        "Ranks, ms of each step; a rank makes others wait that has a gradient last, also if the "
        "order made it so",
        rows,
    )


def _blocked_table(waits: Sequence[ExposedWait]) -> Table:
    """What blocked what: the longest waits of a parameter, and what was sent meanwhile."""
    longest = sorted((each for each in waits if each.parts is not None), key=lambda w: -w.us)
    rows = [["reader of", "rank", "step", "ms", "late", "queue", "transfer", BECAUSE]]
    for each in longest[:_MOST_BLOCKED]:
        assert each.parts is not None
        parts = each.parts.late, each.parts.queue, each.parts.transfer
        rows.append([
            each.wait.name, str(each.rank), str(each.wait.step), f"{each.us / 1e3:.2f}",
            *(f"{us / 1e3:.2f}" for us in parts), _because(each),
        ])  # fmt: skip
    return Table("What blocked what: the longest waits", rows)


def _because(each: ExposedWait) -> str:
    assert each.parts is not None
    causes = []
    least_us = _WORTH_A_WORD * each.us
    if each.parts.late > least_us:
        causes.append(f"rank {each.late_rank} had the gradient last")
    if each.parts.queue > least_us:
        sent = [
            f"{one.name}{' (less urgent)' if one.inversion else ''}"
            for one in each.meanwhile[:_MOST_NAMED]
        ]
        more = len(each.meanwhile) - len(sent)
        names = ", ".join(sent) + (f" and {more} more" if more > 0 else "")
        causes.append(f"sent first: {names}" if sent else "nothing was sent: ranks were to agree")
    if each.parts.transfer > least_us:
        causes.append(f"{each.blocked_by} travelled")
    return "; ".join(causes) or "the wait was too short to tell"


def _suggestions(outcome: Suggestions) -> Iterator[str]:
    if outcome.why_none:
        yield f"No suggestion: {outcome.why_none}."
        return
    for each in outcome.best:
        yield f"{ms_text(each.gain_s)} less of each step: {each.text}."
    if not outcome.best:
        yield "No change that was simulated makes the step 1% shorter."
    yield f"The simulated step takes {ms_text(outcome.simulated_s)} as it is."
