"""The elastic agent that started this process, and files that live as long as it does.

torch's elastic agent (torchrun, ``hvd-order run``) is one process a host; it starts the workers and
starts them again after a failure. What must outlive a worker is kept under the agent's name.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["agent_folders", "agent_of_this_process", "restarts_workers", "sweep"]

_RUN_ID = "TORCHELASTIC_RUN_ID"  # in the environment of workers, not in that of their agent
_MEMORY = Path("/dev/shm")


def restarts_workers(environ: Mapping[str, str]) -> bool:
    """Whether an elastic agent started this process."""
    return _RUN_ID in environ


def agent_of_this_process() -> int:
    """The agent's process id: the first ancestor that is no worker itself.

    There may be a shell script in between, which is another process after every restart.
    """
    pid = os.getppid()
    while _is_worker(pid):
        parent = _stat_field(pid, 4)
        if parent is None or parent <= 1:
            break
        pid = parent
    return pid


def agent_folders(agent: int) -> list[Path]:
    """Where the workers of an agent keep files, best first: in memory, else on disk.

    The name has the process id and its start time, since ids are used again.
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
    """A field of proc(5)'s stat file, counted from 1 as there; None: no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[number - 3])  # the name in field 2 may have spaces
