"""People who are no part of a job: on its ports, and at the doors of its servers."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
from pathlib import Path

__all__ = ["Impostor", "Visit", "listening"]

_LISTEN = "0A"


def listening() -> set[tuple[bool, int, str]]:
    """The ports of this network namespace that somebody listens on: (IPv6, port, inode)."""
    found = set()
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            words = line.split()
            if words[3] == _LISTEN:
                found.add((name == "tcp6", int(words[1].rpartition(":")[2], 16), words[9]))
    return found


class Visit:
    """Random bytes to each port; half of the connections stay open and say nothing more.

    Attributes:
        ports: how many there were.
    """

    def __init__(self, seed: int) -> None:
        numbers = random.Random(seed)
        self.ports = 0
        self._open: list[socket.socket] = []
        for v6, port, _ in sorted(listening()):
            self.ports += 1
            for size in (0, 1, 8, 64, numbers.randrange(100, 5000)):
                with contextlib.suppress(OSError):  # who closes the door on strangers is right
                    stranger = socket.create_connection(("::1" if v6 else "127.0.0.1", port), 5)
                    stranger.sendall(numbers.randbytes(size))
                    if numbers.random() < 0.5:
                        self._open.append(stranger)
                    else:
                        stranger.close()

    def end(self) -> None:
        for stranger in self._open:
            stranger.close()


class Impostor:
    """Says that it is a worker, with a secret of its own; started early, since torch takes long."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._begun = False

    def begin(self, store: str) -> None:
        """Goes to the servers that meet at this store."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(store + "\n")
            self._process.stdin.flush()
        self._begun = True

    def end(self) -> str:
        """What came of it: "admitted", "refused", "nobody", or why it could not try."""
        if not self._begun:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, _ = self._process.communicate(timeout=15)
            return (said.strip().splitlines() or ["nobody"])[-1]
        self._process.kill()
        self._process.communicate()
        return "nobody"


def main() -> None:
    """As the impostor."""
    from datetime import timedelta

    from hvd_order.base.errors import HvdOrderError, NotTrusted
    from hvd_order.servers.process import orders
    from hvd_order.servers.worker import connections

    store = sys.stdin.readline().strip()
    stranger = b"not the secret of this job......"
    try:
        meeting = connections.MeetingPoint(store, timedelta(seconds=3))
        meeting.own().set("server/0/nonsense", b"\xff" * 100)
        orders.give(meeting, stranger, {"what": "remove", "server": 0})
        connections.take_part(meeting, stranger, "worker 0", 0, timedelta(seconds=3))
    except NotTrusted:
        print("refused")
    except (HvdOrderError, RuntimeError) as error:
        print(f"nobody: {error!r}".splitlines()[0])
    else:
        print("admitted")


if __name__ == "__main__":
    main()
