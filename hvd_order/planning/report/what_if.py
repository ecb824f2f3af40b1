"""Report on a model on a network: as text, and as one self-contained page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvd_order.base.link.advice import Advice, advise
from hvd_order.planning.predict.simulated_step import Idle, Step, Wait
from hvd_order.planning.predict.what_if import WhatIf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report", "advice_text", "page_of", "report_of", "text_of"]

_MOST = 6  # lines of a list; the rest is added up
_MODES = {
    "order": "order, overlapping with the next step (hvd_order's defaults)",
    "arrival": "large slices as they come, overlapping with the next step "
    "(HVD_ORDER_POLICY=arrival HVD_ORDER_SLICE_BYTES=25MiB)",
    "none": "none: stay with what you have",
}
_CLIPPED_MODES = {
    "split": "sums in halves, the second of which overlaps with the next step (hvd_order's "
    "defaults)",
    "order": "order, whole sums, awaited before the norm (HVD_ORDER_SPLIT=never)",
    "arrival": "large slices as they come, whole sums, awaited before the norm "
    "(HVD_ORDER_SPLIT=never HVD_ORDER_POLICY=arrival HVD_ORDER_SLICE_BYTES=25MiB)",
    "none": _MODES["none"],
}
_CLIPPED = "; gradients are clipped by their global norm"
_COLUMNS = (
    "as today: DDP, all gradients awaited; the other two overlap with the next step. "
    "gain: in order against today"
)
_CLIPPED_COLUMNS = (
    "as today: DDP; in the first three columns of steps all gradients are awaited before the norm "
    "is known. in halves: the second half of each sum overlaps with the next step. "
    "gain: in halves against today"
)
_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:75em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .9em;text-align:right;"
    "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
    "img{max-width:100%}dt{float:left;clear:left;width:6em;text-align:right}dd{margin-left:7em}"
)


@dataclass(frozen=True)
class Section:
    """A heading, and lines with how much time each is about."""

    heading: str
    lines: list[tuple[float, str]]


@dataclass(frozen=True)
class Report:
    """Content of a report, independent of its format.

    Attributes:
        facts: sentences.
        rows: rows of the table, the header first.
    """

    title: str
    facts: list[str]
    rows: list[list[str]]
    sections: list[Section]


def report_of(model: str, what_if: WhatIf, steps: Sequence[Step]) -> Report:
    """Sums up simulated steps of one model on one network."""
    bound_s = what_if.bound_s
    servers = "" if what_if.servers is None else f", {_count(what_if.servers, 'parameter server')}"
    rows = [
        ["", "step", "x bound", "E", "S", "of possible", "computes", "waits", "link busy", "idle"]
    ]
    for step in steps:
        overlap = step.overlap
        rows.append(
            [
                step.title,
                _ms(step.step_s),
                f"{step.step_s / bound_s:.3f}",
                _number(overlap.efficiency),
                _number(overlap.speedup),
                _number(overlap.part_of_possible(bound_s)),
                _ms(step.compute_s),
                _ms(step.wait_s),
                _ms(step.step_s - step.idle_s),
                _ms(step.idle_s),
            ]
        )
    rows.append(["bound: no order does better", _ms(bound_s), "1.000", *[""] * 7])
    facts = [
        f"{what_if.network}{servers}{_CLIPPED * what_if.clipped}.",
        f"Gradients of {what_if.size_bytes / 1e6:.4g} MB keep the link busy for "
        f"{_ms(what_if.wire_s)}, slices' costs aside; computation takes "
        f"{_ms(what_if.graph.compute_s)}.",
    ]
    if what_if.servers is None:  # a mode of hvd_order is recommended, and it has no servers yet
        facts.append(_advice_fact(advise(what_if.outlook()), what_if.clipped))
    sections = []
    for step in steps:
        sections.append(Section(f"{step.title}: when the link is idle", _idle_lines(step.idle)))
        sections.append(Section(f"{step.title}: what blocks what", _wait_lines(step.waits)))
    return Report(f"{model}: what transfers cost", facts, rows, sections)


def text_of(report: Report) -> str:
    """Formats a report for a terminal."""
    lines = [report.title, "", *report.facts, "", *_table(report.rows)]
    for section in report.sections:
        lines += ["", section.heading]
        lines += [f"{_ms(seconds):>12}  {text}" for seconds, text in section.lines]
        lines += ["     nothing"] * (not section.lines)
    return "\n".join(lines) + "\n"


def page_of(report: Report, figure: Figure, picture_is: str = "Gantt picture of the steps") -> str:
    """HTML with the picture inside: one file, nothing to load."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    head, *body = report.rows
    parts = [
        f"<h1>{_escaped(report.title)}</h1>",
        *(f"<p>{_escaped(fact)}</p>" for fact in report.facts),
        "<table>",
        _html_row("th", head),
        *(_html_row("td", row) for row in body),
        "</table>",
        f'<p><img alt="{_escaped(picture_is)}" src="data:image/png;base64,'
        f'{base64.b64encode(picture.getvalue()).decode()}"></p>',
    ]
    for section in report.sections:
        items = "".join(
            f"<dt>{_ms(seconds)}</dt><dd>{_escaped(text)}</dd>" for seconds, text in section.lines
        )
        parts += [
            f"<h2>{_escaped(section.heading)}</h2>",
            f"<dl>{items or '<dd>nothing</dd>'}</dl>",
        ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_escaped(report.title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def advice_text(model: str, networks: Sequence[WhatIf], here: int | None) -> str:
    """A table over networks, and the recommendation.

    Args:
        networks: the same model on each.
        here: place of the requested network; None if there is none.
    """
    first = networks[0]
    halves = ["in halves"] * first.clipped
    rows = [["link", "gradients", "as today", "as they come", "in order", *halves, "bound", "gain",
             "possible", "mode"]]  # fmt: skip
    advices = []
    for i, what_if in enumerate(networks):
        outlook = what_if.outlook()
        advices.append(advise(outlook))
        rows.append(
            [
                ("> " if i == here else "") + what_if.network.rate_text,
                *map(_ms, (outlook.wire_s, outlook.today_s, outlook.arrival_s, outlook.order_s,
                           *([] if outlook.split_s is None else [outlook.split_s]),
                           outlook.bound_s)),
                f"{100 * outlook.gain:.0f} %",
                f"{100 * outlook.possible_gain:.0f} %",
                advices[-1].mode,
            ]
        )  # fmt: skip
    lines = [
        f"{model}: computation {_ms(first.graph.compute_s)}, gradients of "
        f"{first.size_bytes / 1e6:.4g} MB; "
        + (str(networks[here].network) if here is not None
           else f"{_count(first.network.ranks, 'worker')} on usual networks")
        + _CLIPPED * first.clipped,
        "",
        *_table(rows),
        "",
        _CLIPPED_COLUMNS if first.clipped else _COLUMNS,
    ]  # fmt: skip
    if here is not None:
        lines += ["", _advice_fact(advices[here], first.clipped)]
    return "\n".join(lines) + "\n"


def _advice_fact(advice: Advice, clipped: bool) -> str:
    mode = (_CLIPPED_MODES if clipped else _MODES)[advice.mode]
    return f"Recommended: {mode}. {advice.reason[0].upper()}{advice.reason[1:]}."


def _idle_lines(idle: Sequence[Idle]) -> list[tuple[float, str]]:
    """By cause, the longest first."""
    by_cause: dict[str, list[Idle]] = {}
    for each in idle:
        by_cause.setdefault(each.cause, []).append(each)
    lines = []
    for cause, some in by_cause.items():
        longest = max(some, key=lambda each: each.length_s)
        times = f" ({len(some)} times)" if len(some) > 1 else ""
        until = f"; the longest, {_ms(longest.length_s)}, until {longest.until}"
        lines.append(
            (sum(each.length_s for each in some), cause + times + until * bool(longest.until))
        )
    return sorted(lines, reverse=True)


def _wait_lines(waits: Sequence[Wait]) -> list[tuple[float, str]]:
    """The longest first; the rest as one."""
    longest = sorted(waits, key=lambda wait: -wait.length_s)
    lines = [(wait.length_s, _wait_text(wait)) for wait in longest[:_MOST]]
    rest = longest[_MOST:]
    if rest:
        lines.append((sum(wait.length_s for wait in rest), f"{_count(len(rest), 'more wait')}"))
    return lines


def _wait_text(wait: Wait) -> str:
    text = f"{wait.waiting} waits for {wait.awaited}"
    if not wait.behind:
        return f"{text}, which has the link for itself"
    first = ", ".join(f"{name} ({_ms(seconds)})" for name, seconds in wait.behind[:3])
    more = len(wait.behind) - 3
    return f"{text}, beside or behind {first}{f' and {more} more' * (more > 0)}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        yield "  ".join(cells).rstrip()


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_escaped(cell)}</{tag}>" for cell in cells) + "</tr>"


def _escaped(text: str) -> str:
    return html.escape(text)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 10 else f"{seconds:.2f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
