"""Offset between the clocks of two ranks, from collectives that both took part in.

Nobody can leave a collective before everybody has entered it. So for rank r and rank 0, which enter
at a and leave at b on their own clocks, the offset o = clock of r - clock of 0 satisfies

    a_r - b_0  <=  o  <=  b_r - a_0.

Each further collective narrows the interval (Marzullo's algorithm has the same form). Several in a
row suffice: the first brings the ranks together, so the later ones are as short as the network's
latency.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__: list[str] = []

_DRIFT = 100e-6  # of two quartz clocks, that nobody disciplines: twice 50 ppm

Passage = tuple[int, int]
"""When a rank entered a collective and when it left, in ns of its own clock."""


@dataclass(frozen=True)
class ClockOffset:
    """The clock of a rank is ahead of rank 0's by at least `low_ns` and at most `high_ns`.

    Attributes:
        at_ns: when this held, on the clock of the rank.
    """

    low_ns: float
    high_ns: float
    at_ns: int

    @property
    def ns(self) -> float:
        """The middle of the interval: subtract it to get times of rank 0's clock."""
        return (self.low_ns + self.high_ns) / 2

    @property
    def error_ns(self) -> float:
        """Largest possible error of `ns`."""
        return (self.high_ns - self.low_ns) / 2


def clock_offset(
    mine: Iterable[Passage], of_rank_0: Iterable[Passage], before: ClockOffset | None = None
) -> ClockOffset:
    """Returns the offset to rank 0's clock after the collectives with these passages.

    Args:
        mine, of_rank_0: of the same collectives, at least one.
        before: an earlier result; it is widened by what two clocks may drift since, and left out
            where it contradicts the new passages (a clock was set, or a host was suspended).
    """
    pairs = list(zip(mine, of_rank_0, strict=True))
    low: float = max(entered - left_0 for (entered, _), (_, left_0) in pairs)
    high: float = min(left - entered_0 for (_, left), (entered_0, _) in pairs)
    at_ns = max(left for (_, left), _ in pairs)
    if before is not None:
        drift = _DRIFT * (at_ns - before.at_ns)
        both = max(low, before.low_ns - drift), min(high, before.high_ns + drift)
        if both[0] <= both[1]:
            low, high = both
    return ClockOffset(low, high, at_ns)
