"""How fast a server is, from noisy measurements, and when it has clearly changed."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

from hvd_order.errors import InvalidUsage

__all__ = ["PATIENCE", "SpeedEstimate", "clear", "seconds_per_byte"]

PATIENCE = 4
"""Steps in a row that must say the same before it is believed."""

_WEIGHT = 0.1  # of the newest measurement, once there are many
_CLEAR = 1.2  # times slower or faster, if measurements agree with each other
_OUTLIER = 0.5  # what a single measurement may add to the noise at most


def clear(noise: float) -> float:
    """From which ratio on two servers, or a server before and after, count as different.

    Args:
        noise: mean deviation of a measurement, relative.
    """
    return max(_CLEAR, 1 + 3.5 * noise)


def seconds_per_byte(
    figures: Mapping[int, tuple[int, float]], servers: Container[int]
) -> dict[int, float]:
    """By server, of those that have served anything.

    Args:
        figures: by server: bytes served in a step, and the seconds that it took.
        servers: others are not looked at.

    Raises:
        InvalidUsage: a figure is negative or no number.
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

    A moving average that leaves out what is clearly off. If four measurements in a row are off to
    the same side, it is the server that has changed, and the average begins anew with them.

    Attributes:
        mean: seconds per byte; None before the first measurement.
        noise: mean deviation of a measurement from that, relative.
    """

    def __init__(self) -> None:
        """Knows nothing."""
        self.mean: float | None = None
        self.noise = 0.0
        self._count = 0
        self._odd: list[float] = []  # the latest measurements, if off, all to one side
        self._noise_before = 0.0  # they were off

    def add(self, seconds_per_byte: float) -> bool:
        """A step's measurement.

        Returns:
            Whether the server has clearly changed: the average is of the last few steps alone.
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
        """The load has changed, and the speed may have with it: the next steps weigh more."""
        self._count = min(self._count, 1)
        self._odd.clear()

    def _begin_anew(self) -> None:
        self.mean = sum(self._odd) / len(self._odd)
        self.noise = self._noise_before
        self._count = len(self._odd)
        self._odd.clear()
