"""The elastic agent that started this process, and files that exist while the agent runs.

torch's elastic agent (torchrun, ``hvd-order run``) is one process for each host; it starts the
workers, and restarts them after a failure. Files that must outlive a worker are kept under the
agent's name.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["agent_folders", "agent_of_this_process", "restarts_workers", "sweep"]

_RUN_ID = "TORCHELASTIC_RUN_ID"  # in the workers' environment, not in their agent's
_MEMORY = Path("/dev/shm")


def restarts_workers(environ: Mapping[str, str]) -> bool:
    """Returns whether an elastic agent started this process."""
    return _RUN_ID in environ


def agent_of_this_process() -> int:
    """Returns the agent's process id: the first ancestor that is not a worker itself.

    A shell script may run between the two; it is another process after every restart.
    """
    pid = os.getppid()
    while _is_worker(pid):
        parent = _stat_field(pid, 4)
        if parent is None or parent <= 1:
            break
        pid = parent
    return pid


def agent_folders(agent: int) -> list[Path]:
    """Returns the folders for files of an agent's workers, best first: in memory, else on disk.

    The name has the process id and its start time, since ids are reused.
    """
    name = f"{_prefix()}_{agent}_{_stat_field(agent, 22) or 0}"
    return [root / name for root in _roots()]


def sweep() -> None:
    """Removes this user's folders whose agent has ended; torchrun leaves them behind."""
    for root in _roots():
        for folder in root.glob(f"{_prefix()}_*"):
            match = re.fullmatch(r"(\d+)_(\d+)", folder.name[len(_prefix()) + 1 :])
            if match and (_stat_field(int(match[1]), 22) or 0) != int(match[2]):
                shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    # Containers may share /dev/shm but not process ids.
    try:
        namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        namespace = "0"
    return f"hvd_order_elastic_{os.getuid()}_{namespace}"


def _roots() -> list[Path]:
    disk = Path(tempfile.gettempdir())
    return [_MEMORY, disk] if os.access(_MEMORY, os.W_OK | os.X_OK) else [disk]


def _is_worker(pid: int) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # not Linux, or another user's
        return False
    return any(variable.startswith(f"{_RUN_ID}=".encode()) for variable in variables)


def _stat_field(pid: int, number: int) -> int | None:
    """Returns a field of proc(5)'s stat file, counted from 1 as there; None: no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[number - 3])  # the name in field 2 may have spaces
