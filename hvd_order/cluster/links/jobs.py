"""Jobs on links, the order between them, and what they did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvd_order.cluster.links.step import LinkStep

__all__ = ["LinkJob", "LinkSharing", "LinkTrace"]


@dataclass(frozen=True)
class LinkJob:
    """A job on its machines.

    Attributes:
        load: bytes on each link, by its number, for each byte of gradient (``load_of``).
        workers: how many compute; its weight in a mean over the cluster.
    """

    name: str
    step: LinkStep
    load: Mapping[int, float]
    workers: int = 1

    def link_s(self, capacity: Sequence[float]) -> float:
        """Time for which an iteration alone occupies its narrowest link."""
        narrowest = max((load / capacity[link] for link, load in self.load.items()), default=0.0)
        return self.step.size_bytes * narrowest


@dataclass(frozen=True)
class LinkSharing:
    """Order between jobs; each list has a place for each job.

    Attributes:
        levels: of strict priority, the lowest first; jobs of one level share max-min fairly.
        begin_s: when the job begins.
        every_s: iteration n begins at ``begin_s + n every_s`` or later; 0: when it can.
    """

    levels: Sequence[int]
    begin_s: Sequence[float]
    every_s: Sequence[float]

    @classmethod
    def fair(cls, count: int, begin_s: Sequence[float] | None = None) -> LinkSharing:
        """All jobs alike."""
        return cls([0] * count, begin_s or [0.0] * count, [0.0] * count)


@dataclass
class LinkTrace:
    """What a job did.

    Attributes:
        end_s: of the simulation.
        starts_s: of its iterations.
        busy_s: time in which it computed.
        sent: (begin, end, bytes of gradient a second), where it is not 0; neighbours differ.
    """

    end_s: float
    starts_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    sent: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def sent_bytes(self) -> float:
        """Of gradients."""
        return math.fsum((end - begin) * rate for begin, end, rate in self.sent)

    @property
    def iteration_s(self) -> float:
        """Mean over the later two thirds of the iterations; infinity if none began.

        The one under way counts as ended if it already takes longer than the others: else a job
        that waits for ever would be as fast as it was before.
        """
        last = len(self.starts_s) - 1
        if last < 0:
            return math.inf
        first = last // 3
        under_way_s = self.end_s - self.starts_s[last]
        ended_s = self.starts_s[last] - self.starts_s[first]
        if last == first or under_way_s * (last - first) > ended_s:
            return (ended_s + under_way_s) / (last - first + 1)
        return ended_s / (last - first)
