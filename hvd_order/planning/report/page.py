"""A report as text for a terminal, and as one self-contained page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "CODED_COLUMN",
    "ReportContent",
    "Section",
    "counted",
    "ms_text",
    "page_of",
    "table_lines",
    "text_of",
]

CODED_COLUMN = (
    "with 8 bits: compression=hvd.Compression.auto of PyTorch, as if all gradients were of float32 "
    "and of two dimensions or more, which a profile does not know. -: it would choose none."
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
class ReportContent:
    """Content of a report, independent of its format.

    Attributes:
        facts: sentences.
        rows: rows of the table, the header first.
    """

    title: str
    facts: list[str]
    rows: list[list[str]]
    sections: list[Section]


def text_of(report: ReportContent) -> str:
    """Formats a report for a terminal."""
    lines = [report.title, "", *report.facts, "", *table_lines(report.rows)]
    for section in report.sections:
        lines += ["", section.heading]
        lines += [f"{ms_text(seconds):>12}  {text}" for seconds, text in section.lines]
        lines += ["     nothing"] * (not section.lines)
    return "\n".join(lines) + "\n"


def page_of(report: ReportContent, figure: Figure, picture_is: str) -> str:
    """HTML with the picture inside: one file, nothing to load."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    head, *body = report.rows
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        *(f"<p>{escape(fact)}</p>" for fact in report.facts),
        "<table>",
        _html_row("th", head),
        *(_html_row("td", row) for row in body),
        "</table>",
        f'<p><img alt="{escape(picture_is)}" src="data:image/png;base64,'
        f'{base64.b64encode(picture.getvalue()).decode()}"></p>',
    ]
    for section in report.sections:
        items = "".join(
            f"<dt>{ms_text(seconds)}</dt><dd>{escape(text)}</dd>" for seconds, text in section.lines
        )
        parts += [
            f"<h2>{escape(section.heading)}</h2>",
            f"<dl>{items or '<dd>nothing</dd>'}</dl>",
        ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with columns of equal width, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        yield "  ".join(cells).rstrip()


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def ms_text(seconds: float) -> str:
    """Milliseconds, or seconds from 10 on."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 10 else f"{seconds:.2f} s"


def counted(number: int, noun: str) -> str:
    """``1 server``, ``2 servers``."""
    return f"{number} {noun}{'s' * (number != 1)}"
