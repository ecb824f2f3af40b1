"""A progress bar on one line of a terminal; plain lines where the output is no terminal."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

_BAR_CELLS = 24
_REDRAW_S = 0.1
_PLAIN_LINES = 10


class ProgressBar:
    """Shows how much is done and how long the rest will take.

    Args:
        total: steps to come, at least 1.
        out: where to write.
        clock: seconds; tests give their own.
    """

    def __init__(
        self, total: int, out: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._out = out
        self._clock = clock
        self._terminal = out.isatty()
        self._begin_s = clock()
        self._drawn_s = self._begin_s - _REDRAW_S
        self._done = 0

    def advance(self, note: str) -> None:
        """One more step is done; ``note`` says what it was."""
        self._done += 1
        now_s = self._clock()
        if self._terminal:
            if now_s - self._drawn_s >= _REDRAW_S or self._done == self._total:
                self._drawn_s = now_s
                columns = shutil.get_terminal_size().columns - 1
                self._out.write("\r" + self._line(note, now_s)[:columns].ljust(columns))
                self._out.flush()
        elif self._tenths(self._done) != self._tenths(self._done - 1):
            self._out.write(self._line(note, now_s) + "\n")
            self._out.flush()

    def close(self) -> None:
        """Leaves the line; what is written next starts on a new one."""
        if self._terminal:
            self._out.write("\n")
            self._out.flush()

    def _tenths(self, done: int) -> int:
        return done * _PLAIN_LINES // self._total

    def _line(self, note: str, now_s: float) -> str:
        share = self._done / self._total
        passed_s = now_s - self._begin_s
        left_s = passed_s / share - passed_s
        full = int(share * _BAR_CELLS)
        bar = "#" * full + "." * (_BAR_CELLS - full)
        return f"[{bar}] {share:4.0%}  {_clock(passed_s)} < {_clock(left_s)}  {note}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
