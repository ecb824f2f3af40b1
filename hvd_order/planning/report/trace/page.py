"""The report about a timeline as a page: one file, nothing to load, no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hvd_order.planning.report.trace.content import BECAUSE, LayerBar, Table, TraceReport

__all__ = ["page_of"]

_MOST_BARS = 20
_CAUSES = ("late", "queue", "transfer", "other")
_STYLE = """
:root{color-scheme:light dark;--text:#1c1c1c;--back:#fff;--line:#c8c8c8;--late:#b3261e;
--queue:#8a6100;--transfer:#1f5fa8;--other:#6b6b6b}
@media(prefers-color-scheme:dark){:root{--text:#ececec;--back:#161616;--line:#4a4a4a;--late:#ff8a80;
--queue:#f0c04c;--transfer:#7fb4f5;--other:#a8a8a8}}
body{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em;
color:var(--text);background:var(--back)}
h2{margin-top:2em}.wide{overflow-x:auto}
table{border-collapse:collapse;margin:.5em 0 1.5em}caption{text-align:left;padding:.3em 0}
td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid var(--line);vertical-align:top;
white-space:nowrap}
td.text,th.text{text-align:left;white-space:normal}th[scope=row]{text-align:left;font-weight:normal}
.bar{display:flex;height:1.1em;width:24em}.bar span{display:block;height:100%}
.late{background:var(--late)}.queue{background:var(--queue)}.transfer{background:var(--transfer)}
.other{background:var(--other)}
.key span{display:inline-block;width:1em;height:1em;margin:0 .35em 0 1.2em;vertical-align:-.1em}
"""


def page_of(report: TraceReport) -> str:
    """Returns the page, which is readable on a light and on a dark screen, and without colours."""
    layers, *others = report.tables
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        *(f"<p>{escape(fact)}</p>" for fact in report.facts),
        "<h2>What would help, by the simulator</h2>",
        "<ul>",
        *(f"<li>{escape(text)}</li>" for text in report.suggestions),
        "</ul>",
        "<h2>Exposed time</h2>",
        *_key(layers),
        *_table(layers, _pictures(report.bars, layers)),
        *(line for table in others for line in _table(table)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(report.title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><main>\n" + "\n".join(parts) + "\n</main></body>"
        "</html>\n"
    )


def _key(layers: Table) -> Iterator[str]:
    shown = [cause for cause in _CAUSES if cause in layers.rows[0]]
    marks = "".join(f'<span class="{cause}" aria-hidden="true"></span>{cause}' for cause in shown)
    yield f'<p class="key">Colours of the bars: {marks}</p>'


def _pictures(bars: Sequence[LayerBar], layers: Table) -> list[str]:
    """A bar for each row of the table; what it shows stands in the row as numbers."""
    longest = max((bar.total for bar in bars), default=0.0)
    pictures = []
    for bar in bars[: min(_MOST_BARS, len(layers.rows) - 1)]:
        values = zip(_CAUSES, (bar.late, bar.queue, bar.transfer, bar.unknown), strict=True)
        pieces = "".join(
            f'<span class="{cause}" style="width:{100 * value / longest:.2f}%"></span>'
            for cause, value in values
            if longest and value
        )
        pictures.append(f'<div class="bar" aria-hidden="true">{pieces}</div>')
    return pictures + [""] * (len(layers.rows) - 1 - len(pictures))


def _table(table: Table, pictures: Sequence[str] | None = None) -> Iterator[str]:
    head, *body = table.rows
    if not body:
        yield f"<p>{escape(table.caption)}: none.</p>"
        return
    textual = {place for place, cell in enumerate(head) if cell == BECAUSE}

    def of(place: int) -> str:
        return ' class="text"' if place in textual else ""

    yield f'<div class="wide"><table><caption>{escape(table.caption)}</caption><thead><tr>'
    for place, cell in enumerate(head):
        yield f'<th scope="col"{of(place)}>{escape(cell)}</th>'
    if pictures is not None:
        yield '<th scope="col" class="text" aria-hidden="true"></th>'
    yield "</tr></thead><tbody>"
    for number, row in enumerate(body):
        cells = [f'<th scope="row">{escape(row[0])}</th>']
        cells += [f"<td{of(i)}>{escape(cell)}</td>" for i, cell in enumerate(row[1:], 1)]
        if pictures is not None:
            cells.append(f'<td class="text" aria-hidden="true">{pictures[number]}</td>')
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
