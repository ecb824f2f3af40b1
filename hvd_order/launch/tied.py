"""Processes that end with the one that started them, even where that is killed.

A launcher that gets SIGKILL can tell nobody. Without this its workers would train on, keep the
devices, and write the files of the job that is started in their place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["tied"]

# Runs in the new process and becomes the command. Python ignores two signals, which a command of
# another kind would inherit.
_TIE = """\
import ctypes, os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):  # it has ended before that
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"hvd-order: {sys.argv[2]} cannot be run: {error.strerror}")
"""


def tied(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` until this process, or this thread, ends.

    On systems other than Linux the command alone. It takes some 20 ms longer to start.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]
