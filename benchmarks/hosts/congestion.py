"""Permission for a congestion control, lent by the machine for the moment of setting it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

__all__ = ["permitted"]

_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


@contextlib.contextmanager
def permitted(name: str) -> Iterator[None]:
    """Lists `name` among what any namespace may choose, and takes it off again.

    A namespace keeps what it has chosen when the list is as before, so nothing of the machine
    stays changed. Who may not write the list goes on without.
    """
    with contextlib.ExitStack() as undo:
        try:
            allowed = undo.enter_context(_ALLOWED.open("r+", encoding="ascii"))
        except OSError:
            yield
            return
        fcntl.flock(allowed, fcntl.LOCK_EX)  # two starts at once would restore each other's list
        before = allowed.read().split()
        if name not in before:
            with contextlib.suppress(OSError):  # read-only, or the kernel does not have it
                _ALLOWED.write_text(" ".join([*before, name]))
                undo.callback(_ALLOWED.write_text, " ".join(before))
        yield
