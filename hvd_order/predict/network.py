"""The network of a what-if: as it was measured, as it is named, or both."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvd_order.errors import InvalidUsage
from hvd_order.plan.files.profile import MeasuredLink
from hvd_order.plan.link.cut import LinkModel
from hvd_order.predict.simulate import AllReduce
from hvd_order.predict.units import rate_text

__all__ = [
    "LANES",
    "USUAL_LATENCY_S",
    "Network",
]

USUAL_LATENCY_S = 50e-6
"""Of a message over TCP between two hosts of a data centre, system calls included."""

LANES = {"gloo": 2, "nccl": 1}
"""How many slices a back end works on at once: Gloo has two threads, NCCL one stream."""


@dataclass(frozen=True)
class Network:
    """Workers and what is between them.

    Attributes:
        ranks: workers.
        link: an all-reduce among all of them, as the planner sees it.
        message_latency_s: of one message from worker to worker.
        lanes: slices that the transport works on at once; 0: all that are in flight.
        measured: whether the bandwidth is that of a real transport.
    """

    ranks: int
    link: LinkModel
    message_latency_s: float
    lanes: int = 2
    measured: bool = False

    @classmethod
    def of_link(cls, measured: MeasuredLink, ranks: int | None = None) -> Network:
        """As a profile has it; for another number of ranks as a ring changes with it.

        Raises:
            InvalidUsage: the link of a single rank says nothing about several.
        """
        count = measured.ranks if ranks is None else ranks
        if measured.ranks < 2:
            raise InvalidUsage(
                "the profile's link was measured with one rank, which sends nothing; name a "
                "bandwidth"
            )
        hops = 2 * (measured.ranks - 1)
        message_s = measured.link.latency_s / hops
        link = LinkModel(
            message_s * 2 * (count - 1),
            measured.link.slice_cost_s,
            measured.link.seconds_per_byte * _ring_share(count) / _ring_share(measured.ranks),
        )
        return cls(count, link, message_s, LANES.get(measured.backend, 0), measured=True)

    @classmethod
    def of_ring(
        cls, ranks: int, bytes_per_s: float, latency_s: float = USUAL_LATENCY_S, lanes: int = 2
    ) -> Network:
        """A ring over links of one rate.

        Args:
            bytes_per_s: of each rank's link, each way, as payload gets it.
            latency_s: of one message.
        """
        all_s = 2 * (ranks - 1) * latency_s
        # As LinkModel.from_streams: a slice costs half the latency at least, and a microsecond.
        link = LinkModel(all_s, max(all_s / 2, 1e-6), _ring_share(ranks) / bytes_per_s)
        return cls(ranks, link, latency_s, lanes)

    @property
    def bytes_per_s(self) -> float:
        """Of each rank's link, each way, if the all-reduce is a ring; 0 for one rank."""
        share = _ring_share(self.ranks)
        return share / self.link.seconds_per_byte if share else 0.0

    @property
    def rate_text(self) -> str:
        """`bytes_per_s` as people name links."""
        return rate_text(self.bytes_per_s)

    def at_rate(self, bytes_per_s: float) -> Network:
        """The same with links of another rate."""
        link = replace(self.link, seconds_per_byte=_ring_share(self.ranks) / bytes_per_s)
        return replace(self, link=link, measured=False)

    def at_latency(self, latency_s: float) -> Network:
        """The same with messages of another latency; what a slice costs stays."""
        link = replace(self.link, latency_s=2 * (self.ranks - 1) * latency_s)
        return replace(self, link=link, message_latency_s=latency_s)

    def all_reduce(self) -> AllReduce:
        """For the simulator."""
        return AllReduce(
            self.link.latency_s,
            self.link.seconds_per_byte,
            self.link.slice_cost_s,
            sent_per_byte=_ring_share(self.ranks),
            lanes=self.lanes,
        )

    def __str__(self) -> str:
        """As people say it."""
        workers = f"{self.ranks} worker{'s' * (self.ranks != 1)}"
        if self.ranks == 1:
            return workers
        how = "measured" if self.measured else "named"
        return (
            f"{workers}, {rate_text(self.bytes_per_s)} ({how}), "
            f"{self.message_latency_s * 1e6:.3g} us a message"
        )


def _ring_share(ranks: int) -> float:
    """Bytes that leave each rank for each byte of gradient. Patarasuk and Yuan, JPDC 69, 2009."""
    return 2 * (ranks - 1) / ranks
