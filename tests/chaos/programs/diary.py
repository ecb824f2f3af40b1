"""What a rank writes down while it trains, for the campaign to read; and how it is made odd.

A file a rank in the folder CHAOS_FOLDER, a line an entry: "import", "init", "up", "step 7",
"trained", "end"; "begins 5"; and "commit" where the job is elastic. Imported before everything
else: faults strike while a rank imports as well.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["Diary", "become_odd"]


class Diary:
    """One rank's. Each entry reaches the file at once."""

    def __init__(self) -> None:
        self._folder = Path(os.environ["CHAOS_FOLDER"])
        self._rank = os.environ["RANK"]
        self._file = (self._folder / f"progress-{self._rank}").open("a", encoding="utf-8")

    def note(self, entry: str) -> None:
        self._file.write(entry + "\n")
        self._file.flush()

    def keep(self, weights: Any) -> None:
        """Writes the last weights, a list of arrays, in one move."""
        import numpy as np

        path = self._folder / f"weights-{self._rank}.npz"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, *weights)
        os.replace(part, path)


def become_odd() -> None:
    """Another setting on the rank that is to have one; a clock that the campaign can move."""
    rank = os.environ["RANK"]
    chosen, _, setting = os.environ.get("CHAOS_SETTING", "").partition(":")
    if chosen == rank:
        name, _, value = setting.partition("=")
        os.environ[name] = value
    clocks = os.environ.get("CHAOS_CLOCKS")
    if clocks is not None and "CHAOS_CLOCK_FILE" not in os.environ:
        os.environ["CHAOS_CLOCK_FILE"] = f"{clocks}/{rank}"
        os.environ["LD_PRELOAD"] = f"{clocks}/moved_clock.so"  # is heeded when a program starts
        os.execv(sys.executable, [sys.executable, *sys.argv])
