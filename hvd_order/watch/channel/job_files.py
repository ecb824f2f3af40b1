"""Which jobs of this user run on this host: each rank 0 leaves a file that its user alone may read.

It has the address of the job's store, and the key that signs what ranks and tools leave there.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["JobFile", "announce", "jobs_here", "withdraw"]


@dataclass(frozen=True)
class JobFile:
    """A job whose rank 0 runs on this host.

    Attributes:
        process: the process id of rank 0, by which users name the job.
        store: "host:port" of its store.
        key: signs records; hexadecimal.
        size: number of ranks.
        command: what rank 0 runs.
    """

    process: int
    store: str
    key: str
    size: int
    command: str

    def __str__(self) -> str:
        return f"{self.process}  {self.store}  {self.size} ranks  {self.command}"


def announce(job: JobFile) -> bool:
    """Leaves the file of a job; whether that was possible here."""
    try:
        folder = _folder()
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(folder):
            return False
        path = folder / f"{job.process}.json"
        draft = path.with_suffix(".part")
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(job), file)
        os.replace(draft, path)
    except OSError:  # a full or read-only disk must not end a training
        return False
    return True


def withdraw(process: int) -> None:
    """Removes the file of a job, if there is one."""
    with contextlib.suppress(OSError):
        (_folder() / f"{process}.json").unlink()


def jobs_here() -> list[JobFile]:
    """Returns the jobs of this user whose rank 0 runs on this host, by process id."""
    folder = _folder()
    try:
        if not _is_private(folder):
            return []
        paths = list(folder.glob("*.json"))
    except OSError:
        return []
    jobs = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError):  # it may end meanwhile
            job = JobFile(**json.loads(path.read_text("utf-8")))
            if Path(f"/proc/{job.process}").exists():
                jobs.append(job)
            else:
                path.unlink()  # of a rank 0 that was killed
    return sorted(jobs, key=lambda job: job.process)


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "hvd_order"
    return Path(tempfile.gettempdir()) / f"hvd_order-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077
