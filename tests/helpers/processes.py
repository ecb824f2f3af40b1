"""What processes are and do, as the kernel sees it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = [
    "arguments_of",
    "descendants",
    "environment_of",
    "heard_elsewhere",
    "is_running",
    "listening_at",
    "processes",
]


def processes() -> Iterator[int]:
    """Those of this namespace that run."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal() and is_running(int(name)))


def is_running(pid: int) -> bool:
    """Whether there is such a process, and no zombie."""
    text = _read(pid, "stat").decode(errors="replace")
    return bool(text) and text.rpartition(")")[2].split()[0] not in "ZX"


def arguments_of(pid: int) -> list[str]:
    """The words of a process's command line; none if it has ended, or is a stranger's."""
    return _read(pid, "cmdline").decode(errors="replace").split("\0")


def environment_of(pid: int) -> dict[str, str]:
    """The variables that a process was started with; see `arguments_of`."""
    entries = _read(pid, "environ").decode(errors="replace").split("\0")
    pairs = (entry.partition("=") for entry in entries)
    return {name: value for name, _, value in pairs if name}


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[psutil.Process]:
    """A process and all that it and they have started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def listening_at(processes: list[psutil.Process]) -> list[tuple[str, str, int]]:
    """Name, address and port of each TCP port that one of them listens on."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [
                (process.name(), connection.laddr.ip, connection.laddr.port)
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
    return found


def heard_elsewhere(listening: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """Those of them that another host could reach."""
    return [each for each in listening if not ipaddress.ip_address(each[1]).is_loopback]
