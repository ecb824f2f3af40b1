"""What users ask of a running scheduler: files in its folder; it may be on another host."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CancelRequests", "is_served"]


class CancelRequests:
    """Requests to take jobs back: a file for each in ``folder / "cancel"``.

    Args:
        folder: the scheduler's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "cancel"

    def add(self, name: str) -> Path:
        """Asks for a job to be cancelled.

        Returns:
            A file that exists until the scheduler has seen the request.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.mkdir(exist_ok=True)
        path = self._folder / name
        path.touch()
        return path

    def take(self) -> Iterator[str]:
        """Names of the jobs; each request is taken once."""
        if self._folder.exists():
            for path in sorted(self._folder.iterdir()):
                path.unlink()
                yield path.name


def is_served(folder: Path) -> bool:
    """Whether a scheduler runs with this folder."""
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
