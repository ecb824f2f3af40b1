"""Speed of a server, from noisy measurements, and detection of a clear change."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

from hvd_order.base.errors import InvalidUsage

__all__ = ["PATIENCE", "SpeedEstimate", "clear", "seconds_per_byte"]

PATIENCE = 4
"""Number of consecutive steps that must agree before a change is accepted."""

_WEIGHT = 0.1  # of the newest measurement, after many
_CLEAR = 1.2  # times slower or faster, for consistent measurements
_OUTLIER = 0.5  # the most that a single measurement adds to the noise


def clear(noise: float) -> float:
    """Returns the ratio from which two servers, or two times of one server, count as different.

    Args:
        noise: mean deviation of a measurement, relative.
    """
    return max(_CLEAR, 1 + 3.5 * noise)


def seconds_per_byte(
    figures: Mapping[int, tuple[int, float]], servers: Container[int]
) -> dict[int, float]:
    """Returns seconds per byte by server, for servers that have served anything.

    Args:
        figures: by server: bytes served in a step, and the seconds that it took.
        servers: servers to include.

    Raises:
        InvalidUsage: a figure is negative or not a number.
    """
    for server, (served, seconds) in figures.items():
        if not (served >= 0 and 0 <= seconds < math.inf):
            raise InvalidUsage(f"server {server} cannot serve {served} bytes in {seconds} s")
    return {
        server: seconds / served
        for server, (served, seconds) in figures.items()
        if server in servers and served and seconds
    }


class SpeedEstimate:
    """Seconds per byte of one server.

    A moving average that leaves out clear outliers. If four measurements in a row are outliers to
    the same side, the server has changed, and the average restarts with them.

    Attributes:
        mean: seconds per byte; None before the first measurement.
        noise: mean relative deviation of a measurement from the mean.
    """

    def __init__(self) -> None:
        """Creates an estimate without measurements."""
        self.mean: float | None = None
        self.noise = 0.0
        self._count = 0
        self._odd: list[float] = []  # the latest measurements, if outliers, all to one side
        self._noise_before = 0.0  # noise before these outliers

    def add(self, seconds_per_byte: float) -> bool:
        """Adds a step's measurement.

        Returns:
            Whether the server has clearly changed: the average then covers the last few steps
                alone.
        """
        if self.mean is None:
            self.mean, self._count = seconds_per_byte, 1
            return False
        ratio = seconds_per_byte / self.mean
        limit = clear(self.noise)
        off = ratio > limit or ratio < 1 / limit
        if self._odd and (not off or (ratio > 1) != (self._odd[0] > self.mean)):
            self._odd.clear()
        if off:
            if not self._odd:
                self._noise_before = self.noise
            self._odd.append(seconds_per_byte)
        self.noise += _WEIGHT * (min(abs(ratio - 1), _OUTLIER) - self.noise)
        if len(self._odd) >= PATIENCE:
            self._begin_anew()
            return True
        if not off:
            self._count += 1
            self.mean += max(_WEIGHT, 1 / self._count) * (seconds_per_byte - self.mean)
        return False

    def loosen(self) -> None:
        """Gives the next steps more weight, because a new load may change the speed."""
        self._count = min(self._count, 1)
        self._odd.clear()

    def _begin_anew(self) -> None:
        self.mean = sum(self._odd) / len(self._odd)
        self.noise = self._noise_before
        self._count = len(self._odd)
        self._odd.clear()
