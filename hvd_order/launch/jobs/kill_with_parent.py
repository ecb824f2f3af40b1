"""Processes that end with the process that started them, even if that is killed.

A launcher that gets SIGKILL cannot notify its workers. Without this module they would train on,
keep the devices, and write the files of the next job. The same holds for the processes that a
worker has started, if the worker fails.
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
    """Returns a command line that runs `command` until this process ends.

    When `command` ends or is killed, all processes that it has started are ended too. The wrapping
    process has the exit code or the signal of `command`, and forwards signals.

    On systems other than Linux it returns `command` itself. The start takes some 20 ms longer.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), *command]


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kills a process of `kill_with_parent` and all that it has started; does not wait."""
    if sys.platform != "linux":
        process.kill()
        return
    from hvd_order.launch.jobs.supervisor import AT_ONCE

    process.send_signal(AT_ONCE)
