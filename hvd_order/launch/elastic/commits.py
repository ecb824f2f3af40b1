"""Storage of committed state outside the process: one file for each host, with the newest commit.

A new commit is written beside the old one and replaces it in one move, so a complete commit exists
whenever a process is killed. The first line has the commit's number, and the last line proves that
the file is complete. Reading a commit unpickles it, which runs code from the file. So only files
that no other user could have written are read: owner and mode are checked after the file was
opened. The same holds for the folder: who may write there can put an old commit in the place of
the newest, or take it away.
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

from hvd_order.base.errors import CommitLost
from hvd_order.launch.elastic.agent import (
    agent_folders,
    agent_of_this_process,
    restarts_workers,
    sweep,
)

__all__ = ["Commit", "CommitFolder"]

T = TypeVar("T")
_SUFFIX = ".commit"
_FIRST = b"hvd_order commit "
_LAST = b"\nend of commit "
_log = logging.getLogger("hvd_order")


@dataclass(frozen=True)
class Commit:
    """A complete commit in a file; numbers count up from 1."""

    number: int
    path: Path


class CommitFolder:
    """The commits of one job on this host.

    Args:
        folders: folders to write to, best first; the next one is used when one is full.
        durable: survive a crash of the machine as well, not only of processes.
    """

    def __init__(self, folders: Sequence[Path], durable: bool) -> None:
        self._folders = list(folders)
        self._durable = durable
        self._swept = durable

    @classmethod
    def of_this_process(cls, directory: str | None) -> CommitFolder | None:
        """Uses the user's `directory`, else memory of this host that exists while the agent runs.

        Returns:
            None where commits would be useless: no directory, and no agent to restart this
                process.
        """
        if directory is not None:
            return cls([Path(directory)], durable=True)
        if restarts_workers(os.environ):
            return cls(agent_folders(agent_of_this_process()), durable=False)
        return None

    def write(self, number: int, dump: Callable[[IO[bytes]], None]) -> None:
        """Replaces this host's commit.

        Args:
            number: number of the commit.
            dump: writes the content.

        Raises:
            CommitLost: there is no room for the commit, or others could write to the folder.
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
        """Returns the newest complete commit visible to this host; in a shared directory, of any
        host.

        Skips files that another user could have written; a warning names them.

        Raises:
            CommitLost: another user could write to the user's directory. Training must not start
                at the beginning because of that.
        """
        if self._durable:
            for folder in self._folders:
                _check_folder(folder)
        found = [
            Commit(number, path)
            for folder in self._folders
            if folder.is_dir() and (self._durable or _is_private(folder))
            for path in folder.glob(f"*{_SUFFIX}")
            if (number := _number_of(path)) is not None
        ]
        return max(found, key=lambda commit: commit.number, default=None)

    def read(self, commit: Commit, load: Callable[[IO[bytes]], T]) -> T:
        """Returns the result of `load` on a commit's content.

        Raises:
            CommitLost: the commit cannot be read, or another user could have written it.
        """
        try:
            with _open_own(commit.path) as file:
                file.readline()
                return load(file)
        except Exception as error:  # unpickling the user's objects may raise anything
            raise CommitLost(
                f"commit {commit.number} in {commit.path} on {socket.gethostname()} cannot be "
                f"read: {type(error).__name__}: {error}"
            ) from error

    def _write_into(self, folder: Path, number: int, dump: Callable[[IO[bytes]], None]) -> None:
        if self._durable:
            _check_folder(folder)
        folder.mkdir(mode=0o755 if self._durable else 0o700, parents=True, exist_ok=True)
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
    """Returns whether only this user can put files there; unpickling a commit runs code."""
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def _check_folder(folder: Path) -> None:
    """Accepts no directory, or the user's where nobody outside of the user's groups can write.

    Others may read it: it may be on a disk that is shared for that. Volumes of Kubernetes belong to
    root and to the pod's own group (``fsGroup``), which may write.

    Raises:
        CommitLost: others could write there, or it is no directory.
    """
    try:
        info = folder.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(info.st_mode):
        cure = "it is a link, which may lead elsewhere tomorrow; name the folder itself"
    elif not stat.S_ISDIR(info.st_mode):
        cure = "it is no directory"
    elif info.st_uid not in (os.getuid(), 0):
        cure = f"it belongs to user {info.st_uid}; name a folder of your own"
    elif info.st_mode & (0o002 if info.st_gid in {os.getegid(), *os.getgroups()} else 0o022):
        cure = f"others may write there; chmod go-w {folder}, or name a folder of your own"
    else:
        return
    raise CommitLost(
        f"commits cannot be kept in {folder} on {socket.gethostname()} (HVD_ORDER_ELASTIC_DIR; "
        f"owner {info.st_uid}, mode {stat.filemode(info.st_mode)}), since reading a commit runs "
        f"code from it: {cure}"
    )


class _UntrustedError(Exception):
    """Another user could have written a file."""


def _open_own(path: Path) -> IO[bytes]:
    """Opens a file that only this user, or root, can have written.

    Raises:
        _UntrustedError: another user could have written it.
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
    """Returns the number of the commit in a file; None if it is incomplete, or not trusted."""
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
    """A file that keeps the error of a failed write: torch's zip writer hides it."""

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
    """Calls `dump`; raises the OSError of a failed write even if `dump` hides it."""
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
