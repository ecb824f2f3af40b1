"""Where a store listens: at one address of this host, not at all, when that is enough.

torch's stores listen at all addresses, whatever host name they are given, so that anybody on any
network of this host may read and write them. They take over a socket that somebody else has made.
"""

from __future__ import annotations

import ipaddress
import socket

__all__ = ["is_loopback", "listening_fd"]


def is_loopback(address: str) -> bool:
    """Whether `address` means this host on every host: ``localhost`` or a number like 127.0.0.1.

    A host's own name does not, even if it leads to 127.0.1.1 here.
    """
    number = _number(address)
    return number is not None and number.is_loopback


def listening_fd(address: str, port: int = 0) -> int | None:
    """A socket that listens at `address` alone, for a store to take over.

    Args:
        address: an IP address of this host, or ``localhost``.
        port: 0 for a free one.

    Returns:
        Its file descriptor; None if `address` is a name or belongs to another host, or if the port
        is taken: then the store may listen at all addresses, or say what is wrong.
    """
    number = _number(address)
    if number is None:
        return None
    family = socket.AF_INET if number.version == 4 else socket.AF_INET6
    try:
        return socket.create_server((str(number), port), family=family).detach()
    except OSError:
        return None


def _number(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
    except ValueError:
        return None
