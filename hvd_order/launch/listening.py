"""Makes a store listen at one address of this host instead of all, where possible.

torch's stores listen at all addresses, regardless of their host name, so any host on any network of
this host may read and write them. But they can take over an existing socket.
"""

from __future__ import annotations

import ipaddress
import socket

__all__ = ["is_loopback", "listening_fd"]


def is_loopback(address: str) -> bool:
    """Whether `address` is the local host everywhere: ``localhost`` or one like 127.0.0.1.

    A host's own name is not, even if it resolves to 127.0.1.1 here.
    """
    number = _number(address)
    return number is not None and number.is_loopback


def listening_fd(address: str, port: int = 0) -> int | None:
    """Opens a socket that listens at `address` alone, for a store to take over.

    Args:
        address: an IP address of this host, or ``localhost``.
        port: port number, 0 for a free port.

    Returns:
        The file descriptor; None if `address` is a name or belongs to another host, or if the port
        is taken. The store then listens at all addresses, or reports the error.
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
