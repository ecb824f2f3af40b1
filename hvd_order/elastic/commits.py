"""Where committed state survives the process that made it: one file a host, the newest commit.

A commit is written beside the old one and takes its place in one move, so whenever a process is
killed there is a whole commit. The first line has its number, the last one proves that it is whole.

To read a commit is to unpickle it, which runs what it says. So only files are read that this user
has written and nobody else could have: their owner and mode are looked at once they are open.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from hvd_order.elastic.agent import agent_folders, agent_of_this_process, restarts_workers, sweep
from hvd_order.errors import CommitLost

__all__ = ["Commit", "CommitFolder"]

T = TypeVar("T")
_SUFFIX = ".commit"
_FIRST = b"hvd_order commit "
_LAST = b"\nend of commit "
_log = logging.getLogger("hvd_order")


@dataclass(frozen=True)
class Commit:
    """A whole commit in a file; numbers count up from 1."""

    number: int
    path: Path


class CommitFolder:
    """The commits of one job on this host.

    Args:
        folders: where to write, best first; the next one is used where there is no room.
        durable: survive a crash of the machine as well, not only of processes.
    """

    def __init__(self, folders: Sequence[Path], durable: bool) -> None:
        self._folders = list(folders)
        self._durable = durable
        self._swept = durable

    @classmethod
    def of_this_process(cls, directory: str | None) -> CommitFolder | None:
        """The user's `directory`, else memory of this host that lives as long as the agent.

        Returns:
            None where commits would serve nobody: no directory, and no agent to start us again.
        """
        if directory is not None:
            return cls([Path(directory)], durable=True)
        if restarts_workers(os.environ):
            return cls(agent_folders(agent_of_this_process()), durable=False)
        return None

    def write(self, number: int, dump: Callable[[IO[bytes]], None]) -> None:
        """Replaces this host's commit.

        Args:
            number: its number.
            dump: writes the content.

        Raises:
            CommitLost: there is no room for it.
        """
        if not self._swept:
            sweep()
            self._swept = True
        while True:
            try:
                self._write_into(self._folders[0], number, dump)
            except OSError as error:
                if not _is_no_room(error):
                    raise
                if len(self._folders) == 1:
                    raise CommitLost(
                        f"commit {number} does not fit into {self._folders[0]} on "
                        f"{socket.gethostname()} ({error.strerror}); name a directory with room "
                        "in HVD_ORDER_ELASTIC_DIR"
                    ) from error
                self._own_file(self._folders.pop(0)).unlink(missing_ok=True)
            else:
                return

    def newest(self) -> Commit | None:
        """The newest whole commit that this host can see; in a shared directory, of any host.

        Files that somebody else could have written are left alone; a warning names them.
        """
        found = [
            Commit(number, path)
            for folder in self._folders
            if folder.is_dir() and (self._durable or _is_private(folder))
            for path in folder.glob(f"*{_SUFFIX}")
            if (number := _number_of(path)) is not None
        ]
        return max(found, key=lambda commit: commit.number, default=None)

    def read(self, commit: Commit, load: Callable[[IO[bytes]], T]) -> T:
        """What `load` makes of a commit's content.

        Raises:
            CommitLost: it cannot be read, or somebody else could have written it.
        """
        try:
            with _open_own(commit.path) as file:
                file.readline()
                return load(file)
        except Exception as error:  # whatever unpickling the user's objects raises
            raise CommitLost(
                f"commit {commit.number} in {commit.path} on {socket.gethostname()} cannot be "
                f"read: {type(error).__name__}: {error}"
            ) from error

    def _write_into(self, folder: Path, number: int, dump: Callable[[IO[bytes]], None]) -> None:
        folder.mkdir(mode=0o777 if self._durable else 0o700, parents=True, exist_ok=True)
        if not self._durable and not _is_private(folder):
            raise CommitLost(
                f"{folder} belongs to somebody else, so commits cannot be kept there; remove it, "
                "or name a directory in HVD_ORDER_ELASTIC_DIR"
            )
        handle, name = tempfile.mkstemp(suffix=".part", dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(_FIRST + b"%d\n" % number)
                _dump(dump, file)
                file.write(_LAST + b"%d\n" % number)
                if self._durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(name, self._own_file(folder))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _own_file(self, folder: Path) -> Path:
        return folder / f"{socket.gethostname()}{_SUFFIX}"


def _is_private(folder: Path) -> bool:
    """Whether only this user can put files there; a commit is unpickled, which runs code."""
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


class _UntrustedError(Exception):
    """Others could have written a file."""


def _open_own(path: Path) -> IO[bytes]:
    """Opens a file that nobody but this user, or root, can have written.

    Raises:
        _UntrustedError: others can.
        OSError: it cannot be opened.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    info = os.fstat(file.fileno())
    ours = stat.S_ISREG(info.st_mode) and info.st_uid in (os.getuid(), 0)
    if ours and not info.st_mode & 0o022:
        return file
    file.close()
    raise _UntrustedError(
        f"{path} (owner {info.st_uid}, mode {stat.filemode(info.st_mode)}) could have been written "
        f"by somebody else than user {os.getuid()}, so it is not read"
    )


def _number_of(path: Path) -> int | None:
    """The number of the commit in a file; None where it is not a whole one, or not ours."""
    try:
        with _open_own(path) as file:
            first = file.readline(64)
            if not first.startswith(_FIRST) or not first.endswith(b"\n"):
                return None
            last = _LAST + first[len(_FIRST) :]
            file.seek(-len(last), os.SEEK_END)
            return int(first[len(_FIRST) :]) if file.read() == last else None
    except _UntrustedError as error:
        _log.warning("%s", error)
        return None
    except (OSError, ValueError):
        return None


# ---- no room ------------------------------------------------------------------------------------


class _Noting:
    """A file that remembers why it could not be written to: torch's zip writer hides it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _dump(dump: Callable[[IO[bytes]], None], file: IO[bytes]) -> None:
    """Calls `dump`; of a write that failed its OSError is raised, whatever `dump` makes of it."""
    noting = _Noting(file)
    try:
        dump(cast("IO[bytes]", noting))
        noting.flush()
    except Exception as error:
        if noting.error is None or noting.error is error:
            raise
        raise noting.error from error


def _is_no_room(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
