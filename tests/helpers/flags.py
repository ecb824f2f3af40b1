"""What one process tells another through a file, so that no test sleeps in place of a wait."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["await_end", "await_flag", "raise_flag"]

_LOOK_S = 0.01


def raise_flag(path: str | Path, text: str = "up") -> None:
    """Lets `await_flag` return, in whatever process it waits."""
    path = Path(path)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.rename(path)


def await_flag(path: str | Path, timeout_s: float = 60.0) -> str:
    """Waits for `raise_flag` on the same path, and returns its text."""
    path = Path(path)
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not been raised after {timeout_s} s"
        time.sleep(_LOOK_S)
    return path.read_text()


def await_end(pid: int, timeout_s: float = 60.0) -> None:
    """Waits until a process has ended, whether or not its parent has asked for its status."""
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + timeout_s
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, f"process {pid} has not ended after {timeout_s} s"
        time.sleep(_LOOK_S)
