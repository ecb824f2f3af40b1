"""Ends the processes of emulated hosts: at the end, after a SIGKILL, and at the next start.

Namespaces and links live as long as a process is inside, so nothing else has to be removed. Every
process of the hosts carries a mark in its environment that names its owner, and its children
inherit it. Who has dropped the mark is found by the network namespace that it shares with one who
has not.

Run as a program this file is the guardian: a process outside of the hosts that waits for its owner
to end, however that happens, and then ends the hosts. Should both be killed at once, the next start
finds the marks of a dead owner (`end_orphans`).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["MARK_VARIABLE", "dismiss", "end_marked", "end_orphans", "new_mark", "start"]

MARK_VARIABLE = "EMULATED_HOSTS_OWNER"
_PATIENCE_S = 5.0  # for killed processes to be gone
_LOOK_S = 0.5  # between two looks whether the owner lives
_count = 0


def new_mark() -> str:
    """A mark of this process that no other one has, neither at the same time nor later."""
    global _count
    _count += 1
    # A process id means something only in its pid namespace, and only with the start time does it
    # name one process for ever.
    return f"{_pid_namespace()}-{os.getpid()}-{_start_time(os.getpid())}-{_count}"


def start(mark: str) -> subprocess.Popen[bytes]:
    """Starts a guardian that ends what has this mark when this process has ended."""
    return subprocess.Popen(
        [sys.executable, "-I", __file__, str(os.getpid()), mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # deaf to Ctrl-C
    )


def dismiss(guardian: subprocess.Popen[bytes]) -> None:
    """Ends a guardian; a second call does nothing."""
    guardian.kill()
    guardian.wait()
    assert guardian.stdin is not None
    guardian.stdin.close()


def end_marked(mark: str) -> list[int]:
    """Kills all processes with this mark; returns the ids of those that are still there."""
    return _end(lambda found: found == mark)


def end_orphans() -> list[int]:
    """Kills what hosts of dead owners have left; returns the ids of those that are still there."""
    return _end(_owner_is_dead)


def _end(wanted: Callable[[str], bool]) -> list[int]:
    deadline = time.monotonic() + _PATIENCE_S
    while (found := list(_members(wanted))) and time.monotonic() < deadline:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.01)  # and look again: one of them may just have forked
    return found


def _members(wanted: Callable[[str], bool]) -> Iterator[int]:
    """The processes with a wanted mark, and those that share a network namespace with one."""
    processes = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    processes.remove(os.getpid())
    marked = {pid for pid in processes if (mark := _mark_of(pid)) and wanted(mark)}
    hosts = {_net_namespace(pid) for pid in marked}
    hosts -= {None, _net_namespace(os.getpid())}  # a marked one that is not in its host yet
    for pid in processes:
        if pid in marked or (hosts and _net_namespace(pid) in hosts):
            yield pid


def _mark_of(pid: int) -> str | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or somebody else's
        return None
    prefix = f"{MARK_VARIABLE}=".encode()
    marks = (x for x in environment.split(b"\0") if x.startswith(prefix))
    return next(marks, b"")[len(prefix) :].decode(errors="replace") or None


def _owner_is_dead(mark: str) -> bool:
    namespace, pid, start, _ = (*mark.split("-"), "", "", "")[:4]
    if namespace != _pid_namespace() or not pid.isdecimal():
        return False  # of another container: its process ids say nothing here
    return _start_time(int(pid)) != start


def _pid_namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _net_namespace(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _start_time(pid: int) -> str | None:
    """When the process started, in the kernel's ticks; None: there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _watch(owner: int, mark: str) -> None:
    """Waits for the owner's end, then ends its hosts.

    The pipe on standard input closes with the owner, except when a process that it forked has the
    other end as well; hence the look at the parent.
    """
    while os.getppid() == owner and not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        pass
    end_marked(mark)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
