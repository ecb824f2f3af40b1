"""Runs an unchanged training script until enough of it has been recorded."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_order.base.errors import InvalidUsage

__all__ = ["Enough", "run_script", "too_few"]


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Runs a script as a program of its own, until it ends or `Enough` is raised in it.

    Raises:
        SystemExit: the script ended with an exit code that is not 0.
    """
    before = sys.argv[:], sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Enough:
        pass
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        sys.argv[:], sys.path[:] = before


def too_few(script: Path, steps: int, needed: str) -> InvalidUsage:
    """The error about a script that ended too early."""
    return InvalidUsage(
        f"{script} ended after {steps} optimizer steps; {needed} are needed. Let it train longer"
    )


class Enough(BaseException):
    """Ends the script; an ``except Exception`` in the script does not catch it."""
