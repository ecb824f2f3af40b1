"""Which jobs of this user run on this host: each rank 0 leaves a file that its user alone may read.

It has the address of the job's store, and the key that signs what ranks and tools leave there.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["JobFile", "announce", "began_at", "jobs_here", "withdraw"]


@dataclass(frozen=True)
class JobFile:
    """A job whose rank 0 runs on this host.

    Attributes:
        process: the process id of rank 0, by which users name the job.
        began_at: as `began_at` says.
        store: "host:port" of its store.
        key: signs records; hexadecimal.
        size: number of ranks.
        command: what rank 0 runs.
    """

    process: int
    began_at: int
    store: str
    key: str
    size: int
    command: str

    def __str__(self) -> str:
        return f"{self.process}  {self.store}  {self.size} ranks  {self.command}"


def announce(job: JobFile) -> bool:
    """Leaves the file of a job; whether that was possible here."""
    for folder in _folders():
        with contextlib.suppress(OSError):  # a full or read-only disk must not end a training
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_private(folder):
                _replace(folder / f"{job.process}.json", json.dumps(asdict(job)))
                jobs_here()  # removes what jobs have left that were killed
                return True
    return False


def withdraw(process: int) -> None:
    """Removes the file of a job, if there is one."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            (folder / f"{process}.json").unlink()


def jobs_here() -> list[JobFile]:
    """Returns the jobs of this user whose rank 0 runs on this host, by process id."""
    paths: list[Path] = []
    for folder in _folders():
        with contextlib.suppress(OSError):
            paths += folder.glob("*.json") if _is_private(folder) else []
    jobs = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError):  # it may end meanwhile
            job = JobFile(**json.loads(path.read_text("utf-8")))
            if began_at(job.process) == job.began_at:
                jobs.append(job)
            else:
                path.unlink()  # of a rank 0 that was killed
    return sorted(jobs, key=lambda job: job.process)


def began_at(process: int) -> int:
    """Returns when a process began, in ticks since the host did: numbers of processes come again.

    0, if there is none.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text("ascii", "replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".part")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.replace(draft, path)


def _folders() -> list[Path]:
    """Where files may be: the shell of a user has a runtime folder, a job of his may have none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = [Path(runtime) / "hvd_order"] if runtime and os.path.isdir(runtime) else []
    return [*own, Path("/tmp") / f"hvd_order-{os.getuid()}"]


def _is_private(folder: Path) -> bool:
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077
