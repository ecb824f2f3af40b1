"""How fast this process sends to each host, from the counters that Linux keeps of TCP connections.

The kernel counts, for each connection, the bytes that the peer has acknowledged and the time during
which there was something to send (``struct tcp_info``: ``tcpi_busy_time``, without the time that it
waited for a receiver that did not read). Their ratio is the rate of the connection while it sends.
So links are compared without a byte of their own, whichever engine has made the connections. Over
other networks (RDMA) nothing is known.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

__all__: list[str] = []

_BYTES_ACKED, _BUSY_TIME = 120, 168  # offsets within struct tcp_info (linux/tcp.h)
_SIZE = 192  # up to tcpi_sndbuf_limited
_LEAST_BUSY_S = 0.05  # the kernel counts ticks of up to 10 ms
_LEAST_PART = 0.1  # of the bytes that would have been sent if gradients went this way

Sent = tuple[int, float]
"""Bytes, and seconds during which there was something to send."""

# Not with objects of class socket: they may make a connection of somebody else non-blocking.
_libc = ctypes.CDLL(None)


def _address(call: Callable[..., int], descriptor: int) -> tuple[str, int] | None:
    """Address and port that getpeername or getsockname tells; None: it is no IP connection."""
    data, size = ctypes.create_string_buffer(128), ctypes.c_uint(128)
    if call(descriptor, data, ctypes.byref(size)) != 0:
        return None
    (family,) = struct.unpack_from("=H", data)
    (port,) = struct.unpack_from("!H", data, 2)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, data.raw[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, data.raw[8:24]).removeprefix("::ffff:"), port
    return None


def _connections() -> Iterator[tuple[int, tuple[str, int], tuple[str, int]]]:
    """Descriptor, peer and own address of each IP connection of this process."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        peer = _address(_libc.getpeername, descriptor)
        own = None if peer is None else _address(_libc.getsockname, descriptor)
        if peer is not None and own is not None:
            yield descriptor, peer, own


def _counters() -> dict[tuple[str, int, int], tuple[int, int, int]]:
    """Acknowledged bytes, busy time and time limited by the receiver (us) of each TCP connection,
    by the peer's address, its port and the own port.
    """
    found = {}
    for descriptor, peer, own in _connections():
        info, size = ctypes.create_string_buffer(_SIZE), ctypes.c_uint(_SIZE)
        answer = _libc.getsockopt(
            descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)
        )
        if answer == 0 and size.value >= _SIZE:  # an old kernel tells less
            (acked,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
            found[peer[0], peer[1], own[1]] = (acked, *struct.unpack_from("=QQ", info, _BUSY_TIME))
    return found


def own_addresses() -> list[str]:
    """The addresses under which this process has connections, but those of loopback."""
    own = {address for _, _, (address, _) in _connections()}
    return sorted(address for address in own if not address.startswith("127.") and address != "::1")


class LinkRates:
    """What was sent to each host since the last look."""

    def __init__(self, host_of: Mapping[str, int], own: int) -> None:
        """Looks for the first time.

        Args:
            host_of: number of the host behind each address.
            own: number of this process's host, to which nothing counts.
        """
        self._host_of = host_of
        self._own = own
        self._before = _counters()

    def sent(self) -> dict[int, Sent]:
        """Returns what was sent to each other host since the last call; -1: to hosts that are none
        of the job's ranks, as those of servers.
        """
        now = _counters()
        sent: defaultdict[int, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for key, (acked, busy_us, receiver_us) in now.items():
            host = self._host_of.get(key[0], -1)
            if host == self._own:
                continue
            then = self._before.get(key, (0, 0, 0))
            busy_s = max(0, (busy_us - then[1]) - (receiver_us - then[2])) / 1e6
            size, seconds = sent[host]
            sent[host] = size + max(0, acked - then[0]), seconds + busy_s
        self._before = now
        return dict(sent)


def slowest(sent: Mapping[int, Sent], gradients: int) -> tuple[int, float]:
    """Returns the host to which this process sends slowest, and bytes per second while it does; -1
    and 0 if nothing is known. Hosts that get few of the bytes do not count: the rate of small
    messages is that of latency, and gradients may go another way (RDMA, other ranks of this host).

    Args:
        gradients: bytes of the gradients of all steps since the last look.
    """
    per_s = {
        host: size / busy_s
        for host, (size, busy_s) in sent.items()
        if host >= 0 and size >= max(_LEAST_PART * gradients, 1) and busy_s >= _LEAST_BUSY_S
    }
    host = min(per_s, key=per_s.__getitem__, default=-1)
    return host, per_s.get(host, 0.0)
