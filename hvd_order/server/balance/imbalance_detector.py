"""When servers are so uneven, and for so long, that slices should move."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from hvd_order.server.balance.speed_estimate import PATIENCE, clear

__all__ = ["ImbalanceDetector", "imbalance"]

_FORGET = 64  # steps after which half of the patience gained is lost again
_MOST = 64  # steps of patience with all servers
_MOST_STUCK = 256  # with one for which nothing helps


def imbalance(times_s: Mapping[int, float], loads: Mapping[int, int]) -> dict[int, float]:
    """How many times later a server finishes than it should; below 1 where it is earlier.

    A late one is held against the smaller of the median and the time that all would need with
    loads as their speeds are: the median says nothing if half of the servers are slow. An early one
    is held against the median.

    Args:
        times_s: of the servers that have slices, positive.
        loads: bytes of the same, positive.
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
    """Goes off when a server is clearly late or early for some steps in a row.

    Each time makes it more patient, and quiet times less: where servers change faster than slices
    can follow, slices had better stay. It is more patient still with a server for which nothing
    could be done, as long as that stays out of line.
    """

    def __init__(self) -> None:
        """Quiet."""
        self._patience = PATIENCE
        self._since = 0  # steps since it went off, or patience was lost
        self._rows: dict[int, int] = {}  # steps in a row late, or if negative early, by server
        self._stuck: dict[int, int] = {}  # the patience with some servers, if it is more
        self._cause: list[int] = []  # servers for which it went off last

    @property
    def quiet(self) -> bool:
        """Whether no server has begun to be out of line: it is not, or has long been."""
        return not any(0 < abs(row) <= PATIENCE for row in self._rows.values())

    def step(self, ratios: Mapping[int, float], noise: float) -> bool:
        """Takes in :func:`imbalance` of one step.

        Args:
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
        """Nothing could be done about the last alarm, or it did not help."""
        for server in self._cause:
            before = max(PATIENCE, self._stuck.get(server, 0))
            self._stuck[server] = min(4 * before, _MOST_STUCK)

    def changed(self) -> None:
        """Slices have moved: steps so far no longer count."""
        self._rows.clear()
