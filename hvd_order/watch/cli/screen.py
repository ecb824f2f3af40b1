"""What ``hvd-order top`` draws: a table of ranks for each optimizer, by rich."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hvd_order.base.account.step_stats import StepStats
from hvd_order.watch.channel.notes import JobNote, ReportNote
from hvd_order.watch.cli.words import counted

__all__ = ["Screen"]

_LINES_BESIDE_RANKS = 9  # titles, the head of a table, the slow rank
_BAR = 20  # characters
_WIDE = 100  # characters that a table with bars needs
_PAPER = 120  # characters of a line where no terminal limits it
_PARTS = (
    ("compute_s", "green"),
    ("late_s", "red"),
    ("queue_s", "yellow"),
    ("transfer_s", "magenta"),
    ("update_s", "blue"),
    ("host_s", "bright_black"),
)


class Screen:
    """Draws one job."""

    def __init__(self, address: str, job: JobNote, console: Console | None = None) -> None:
        """Draws to the standard output, if no console is given."""
        self._address = address
        self._job = job
        is_terminal = sys.stdout.isatty()
        self._console = console or Console(width=None if is_terminal else _PAPER)

    def print(self, report: ReportNote) -> None:
        """Prints a report once, with all ranks."""
        self._console.print(self._drawn(report, most_rows=len(self._job.hosts)))

    @contextlib.contextmanager
    def live(self) -> Iterator[Callable[[ReportNote | None, str], None]]:
        """Takes the terminal; yields what draws a report, or says why there is none."""
        with Live(console=self._console, screen=True, auto_refresh=False) as live:

            def update(report: ReportNote | None, why_none: str) -> None:
                rows = max(1, self._console.height - _LINES_BESIDE_RANKS)
                drawn = self._title() if report is None else self._drawn(report, rows)
                says = Text(f"\nThe job {why_none}") if report is None else Text("")
                live.update(Group(drawn, says), refresh=True)

            yield update

    def _title(self) -> Text:
        hosts = len(set(self._job.hosts))
        began = time.strftime("%H:%M:%S", time.localtime(self._job.began))
        return Text(
            f"{counted(len(self._job.hosts), 'rank')} on {counted(hosts, 'host')}, "
            f"store {self._address}, since {began}"
        )

    def _drawn(self, report: ReportNote, most_rows: int) -> RenderableType:
        title = self._title()
        age_s = max(0.0, time.time() - report.at)
        title.append(f"; newest report {age_s:.0f} s ago", "red" if age_s > 60 else "")
        parts: list[RenderableType] = [title]
        rows = max(1, most_rows // max(1, len(report.stats)))
        for key, stats in report.stats.items():
            if stats:
                parts += self._optimizer(key, report.ranks[key], stats, rows)
        return Group(*parts)

    def _optimizer(
        self, key: str, ranks: Sequence[int], stats: Sequence[StepStats], most_rows: int
    ) -> list[RenderableType]:
        first = stats[0]
        head = Text(f"\n{key}: {first.steps} steps, {first.way}", "bold")
        settings = (
            f"{_bytes(first.wire_bytes)} a step, slices of {_bytes(first.slice_bytes)}, credit "
            f"{_bytes(first.credit_bytes)}, clocks within {first.clock_error_s * 1e3:.2g} ms"
        )
        table = Table(box=None, pad_edge=False)
        for name, style in [
            ("rank", ""), ("host", ""), ("step ms", ""), ("compute", "green"), ("late", "red"),
            ("queue", "yellow"), ("transfer", "magenta"), ("update", "blue"),
            ("host ms", "bright_black"), ("overlap", ""),
        ]:  # fmt: skip
            left_or_right: Any = "left" if name == "host" else "right"
            table.add_column(name, justify=left_or_right, header_style=style)
        has_bars = self._console.width >= _WIDE
        if has_bars:
            table.add_column("of the step")
        places = _shown(ranks, stats, most_rows)
        for place in places:
            each, rank = stats[place], ranks[place]
            table.add_row(
                str(rank), self._job.hosts[rank], _ms(each.step_s),
                *(_ms(getattr(each, name)) for name, _ in _PARTS), f"{each.overlap:.0%}",
                *([_bar(each)] if has_bars else []),
                style="bold" if rank == first.slow_rank else "",
            )  # fmt: skip
        lines: list[RenderableType] = [head, Text(settings), table]
        if len(places) < len(stats):
            lines.append(Text(f"... and {len(stats) - len(places)} more ranks"))
        return [*lines, self._slow(first)]

    def _slow(self, stats: StepStats) -> Text:
        rank = stats.slow_rank
        if rank < 0:
            return Text("No rank holds up the others.", "green")
        host = self._job.hosts[rank] if rank < len(self._job.hosts) else "?"
        detail = f", {stats.slow_detail}" if stats.slow_detail else ""
        return Text(
            f"Rank {rank} on {host} holds up the others by {_ms(stats.slow_s)} ms a step: "
            f"{stats.slow_cause}{detail}. Without it: {_ms(stats.without_s)} ms.",
            "bold red",
        )


def _shown(ranks: Sequence[int], stats: Sequence[StepStats], most: int) -> list[int]:
    """Places of the ranks to show: the slow one, then those that wait least; in rank order."""
    places = sorted(
        range(len(stats)),
        key=lambda place: (ranks[place] != stats[0].slow_rank, stats[place].exposed_s),
    )
    return sorted(places[:most])


def _bar(stats: StepStats) -> Text:
    """The parts of a step, as lengths."""
    bar = Text()
    whole = sum(getattr(stats, name) for name, _ in _PARTS)
    drawn, passed = 0, 0.0
    for name, style in _PARTS:
        passed += getattr(stats, name)
        end = round(_BAR * passed / whole) if whole else 0
        bar.append("█" * (end - drawn), style)
        drawn = end
    return bar


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
