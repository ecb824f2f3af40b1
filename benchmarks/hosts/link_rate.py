"""How fast data really travels from one emulated host to another, by a plain TCP connection."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from .emulated import EmulatedHosts

__all__ = ["PAYLOAD_SHARE", "received_mbit"]

PAYLOAD_SHARE = 1448 / 1514
"""What TCP can carry of a link's rate: 1500-byte packets, 66 bytes of headers with Ethernet's."""

_PORT = 29600
# The receiver's clock runs from the first quarter on: what the token bucket lets through at once
# and the start of TCP are behind it then.
_RECEIVE = """
import json, socket, sys, time
server = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
peer, total, got = server.accept()[0], int(sys.argv[2]), 0
while got < total // 4:
    got += len(peer.recv(1 << 20))
begin, early = time.perf_counter(), got
while data := peer.recv(1 << 20):
    got += len(data)
print(json.dumps([got - early, time.perf_counter() - begin]))
"""
_SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
peer.sendall(bytes(int(sys.argv[3])))
"""


def received_mbit(
    hosts: EmulatedHosts, pairs: Sequence[tuple[int, int]], byte_count: int
) -> list[float]:
    """Sends `byte_count` bytes from the first to the second host of each pair, all at once.

    Returns:
        Payload that arrived, in 10^6 bits a second, for each pair.

    Raises:
        RuntimeError: a connection failed.
    """
    receivers = []
    for stream, (_, target) in enumerate(pairs):
        command = [sys.executable, "-c", _RECEIVE, str(_PORT + stream), str(byte_count)]
        receivers.append(hosts.popen(target, command, stdout=subprocess.PIPE, text=True))
    for receiver in receivers:
        assert receiver.stdout is not None
        receiver.stdout.readline()  # it listens
    for stream, (source, target) in enumerate(pairs):
        to = [hosts.addresses[target], str(_PORT + stream), str(byte_count)]
        hosts.popen(source, [sys.executable, "-c", _SEND, *to])
    rates = []
    for pair, receiver in zip(pairs, receivers, strict=True):
        answer = receiver.communicate()[0]
        if receiver.returncode != 0:
            raise RuntimeError(f"the transfer from host {pair[0]} to host {pair[1]} failed")
        count, seconds = json.loads(answer)
        rates.append(8e-6 * count / seconds)
    return rates
