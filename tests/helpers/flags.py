"""Waits, so that no test sleeps in place of one: for a condition, or for another process's file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from helpers.processes import is_running

__all__ = ["await_end", "await_flag", "comes_true", "raise_flag", "wait_until"]

_LOOK_S = 0.01


def comes_true(condition: Callable[[], object], timeout_s: float = 5.0) -> bool:
    """Waits for a condition; whether it came in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def wait_until(
    condition: Callable[[], object],
    what: str | Callable[[], str] = "",
    timeout_s: float = 60.0,
) -> None:
    """Waits for a condition.

    Args:
        what: is awaited, or a function that says more about why it does not come.
    """
    if not comes_true(condition, timeout_s):
        text = what() if callable(what) else what
        raise AssertionError(f"not within {timeout_s:g} s: {text}")


def raise_flag(path: str | Path, text: str = "up") -> None:
    """Lets `await_flag` return, in whatever process it waits."""
    path = Path(path)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.rename(path)


def await_flag(path: str | Path, timeout_s: float = 60.0) -> str:
    """Waits for `raise_flag` on the same path, and returns its text."""
    path = Path(path)
    wait_until(path.exists, f"{path} is raised", timeout_s)
    return path.read_text()


def await_end(pid: int, timeout_s: float = 60.0) -> None:
    """Waits until a process has ended, whether or not its parent has asked for its status."""
    wait_until(lambda: not is_running(pid), f"process {pid} ends", timeout_s)
