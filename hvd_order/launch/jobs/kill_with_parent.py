"""Processes that end with the one that started them, even where that is killed.

A launcher that gets SIGKILL can tell nobody. Without this its workers would train on, keep the
devices, and write the files of the job that is started in their place. The same goes for what a
worker itself has started, if the worker fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["kill_with_children", "kill_with_parent"]

_SUPERVISOR = Path(__file__).with_name("supervisor.py")


def kill_with_parent(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` until this process ends.

    When `command` ends, or is ended, so is all that it has started. The process has the exit code
    or the signal of `command`, and passes signals on.

    On systems other than Linux the command alone. It takes some 20 ms longer to start.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), *command]


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Ends a tied process with all that it has started, at once; does not wait for it."""
    if sys.platform != "linux":
        process.kill()
        return
    from hvd_order.launch.jobs.supervisor import AT_ONCE

    process.send_signal(AT_ONCE)
