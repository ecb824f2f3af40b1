"""What the processes of a job are and do, as the kernel sees it."""

from __future__ import annotations

import contextlib
import ipaddress

import psutil

__all__ = ["descendants", "heard_elsewhere", "listening_at"]


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
