"""The network of a what-if: from a measurement, from options, or both."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.files.profile import MeasuredLink
from hvd_order.planning.predict.simulate import AllReduceScenario
from hvd_order.planning.predict.units import rate_text

__all__ = [
    "LANES",
    "USUAL_LATENCY_S",
    "Network",
]

USUAL_LATENCY_S = 50e-6
"""Latency of a TCP message between two hosts of a data centre, with system calls."""

LANES = {"gloo": 2, "nccl": 1}
"""Slices that a library transfers at once: Gloo has two threads, NCCL one stream."""


@dataclass(frozen=True)
class Network:
    """Workers and the network between them.

    Attributes:
        ranks: number of workers.
        link: link model of an all-reduce among all workers.
        message_latency_s: latency of one message between workers.
        lanes: slices that the transport transfers at once; 0: all in flight.
        measured: whether the bandwidth was measured on a real transport.
    """

    ranks: int
    link: LinkModel
    message_latency_s: float
    lanes: int = 2
    measured: bool = False

    @classmethod
    def of_link(cls, measured: MeasuredLink, ranks: int | None = None) -> Network:
        """The network of a profile; another number of ranks scales it as a ring.

        Raises:
            InvalidUsage: the link was measured with one rank and several are asked for.
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
            bytes_per_s: payload bandwidth of each rank's link, each way.
            latency_s: latency of one message.
        """
        all_s = 2 * (ranks - 1) * latency_s
        # Same as LinkModel.from_streams: a slice costs at least half the latency and 1 us.
        link = LinkModel(all_s, max(all_s / 2, 1e-6), _ring_share(ranks) / bytes_per_s)
        return cls(ranks, link, latency_s, lanes)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of each rank's link, each way, for a ring all-reduce; 0 for one rank."""
        share = _ring_share(self.ranks)
        return share / self.link.seconds_per_byte if share else 0.0

    @property
    def rate_text(self) -> str:
        """Returns `bytes_per_s` as readable text, such as ``10 Gbit/s``."""
        return rate_text(self.bytes_per_s)

    def at_rate(self, bytes_per_s: float) -> Network:
        """Returns the network with links of another rate."""
        link = replace(self.link, seconds_per_byte=_ring_share(self.ranks) / bytes_per_s)
        return replace(self, link=link, measured=False)

    def at_latency(self, latency_s: float) -> Network:
        """Returns the network with another message latency; the cost of a slice stays."""
        link = replace(self.link, latency_s=2 * (self.ranks - 1) * latency_s)
        return replace(self, link=link, message_latency_s=latency_s)

    def all_reduce(self) -> AllReduceScenario:
        """Returns the network for the simulator."""
        return AllReduceScenario(
            self.link.latency_s,
            self.link.seconds_per_byte,
            self.link.slice_cost_s,
            sent_per_byte=_ring_share(self.ranks),
            lanes=self.lanes,
        )

    def __str__(self) -> str:
        """Describes the network."""
        workers = f"{self.ranks} worker{'s' * (self.ranks != 1)}"
        if self.ranks == 1:
            return workers
        how = "measured" if self.measured else "named"
        return (
            f"{workers}, {rate_text(self.bytes_per_s)} ({how}), "
            f"{self.message_latency_s * 1e6:.3g} us a message"
        )


def _ring_share(ranks: int) -> float:
    """Bytes that each rank sends for each byte of gradient. Patarasuk and Yuan, JPDC 69, 2009."""
    return 2 * (ranks - 1) / ranks
