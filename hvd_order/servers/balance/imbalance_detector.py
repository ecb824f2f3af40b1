"""Detection of servers that are uneven for long enough that slices should move."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from hvd_order.servers.balance.speed_estimate import PATIENCE, clear

__all__ = ["ImbalanceDetector", "imbalance"]

_FORGET = 64  # steps after which half of the gained patience is lost again
_MOST = 64  # steps of patience with all servers
_MOST_STUCK = 256  # with a server for which no move helps


def imbalance(times_s: Mapping[int, float], loads: Mapping[int, int]) -> dict[int, float]:
    """Returns how many times later than it should each server finishes; below 1 if it is early.

    A late server is compared with the smaller of the median and the time that all servers would
    need with loads proportional to their speeds: the median is useless if half of the servers are
    slow. An early server is compared with the median.

    Args:
        times_s: by server with slices; positive.
        loads: bytes of the same servers; positive.
    """
    middle_s = median(times_s.values())
    rate = sum(loads[server] / seconds for server, seconds in times_s.items())
    level_s = sum(loads[server] for server in times_s) / rate
    expected_s = min(middle_s, level_s)
    return {
        server: seconds / (expected_s if seconds > expected_s else middle_s)
        for server, seconds in times_s.items()
    }


class ImbalanceDetector:
    """Raises an alarm when a server is clearly late or early for several steps in a row.

    Each alarm makes the detector more patient, and quiet times make it less so: where servers
    change faster than slices can follow, slices should stay. It is still more patient with a
    server for which no move helped, while that server stays out of line.
    """

    def __init__(self) -> None:
        """Starts without alarm."""
        self._patience = PATIENCE
        self._since = 0  # steps since the alarm or a loss of patience
        self._rows: dict[int, int] = {}  # steps in a row late (negative: early), by server
        self._stuck: dict[int, int] = {}  # patience with some servers, if longer
        self._cause: list[int] = []  # servers that caused the last alarm

    @property
    def quiet(self) -> bool:
        """Whether every server is in line, or has long been out of line."""
        return not any(0 < abs(row) <= PATIENCE for row in self._rows.values())

    def step(self, ratios: Mapping[int, float], noise: float) -> bool:
        """Processes :func:`imbalance` of one step.

        Args:
            ratios: the imbalance, by server.
            noise: mean relative deviation of a server's time.

        Returns:
            Whether some server has been out of line long enough.
        """
        limit = clear(noise)
        for server, ratio in ratios.items():
            side = (ratio > limit) - (ratio < 1 / limit)
            row = self._rows.get(server, 0)
            self._rows[server] = row + side if row * side > 0 else side
            if not side and server in self._stuck:
                self._stuck[server] //= 2
        self._since += 1
        if self._since == _FORGET:
            self._patience = max(PATIENCE, self._patience // 2)
            self._since = 0
        out_of_line = [
            server
            for server, row in self._rows.items()
            if abs(row) >= max(self._patience, self._stuck.get(server, 0))
        ]
        if out_of_line:
            self._patience = min(2 * self._patience, _MOST)
            self._since = 0
            self._rows.clear()
            self._cause = out_of_line
        return bool(out_of_line)

    def futile(self) -> None:
        """Records that no move was possible after the last alarm, or that it did not help."""
        for server in self._cause:
            before = max(PATIENCE, self._stuck.get(server, 0))
            self._stuck[server] = min(4 * before, _MOST_STUCK)

    def changed(self) -> None:
        """Forgets the steps so far, because slices have moved."""
        self._rows.clear()
