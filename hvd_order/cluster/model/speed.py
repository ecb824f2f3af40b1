"""How many samples a second a job trains, by its workers, servers and machines."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hvd_order.base.errors import InvalidUsage

__all__ = ["LocalitySpeed", "Speed", "TableSpeed"]


class Speed(Protocol):
    """Speed of a job. Pure: policies call it as often as they like."""

    def samples_per_s(self, workers: int, servers: int, machines: int, batch: int) -> float:
        """Speed of all workers together.

        Args:
            machines: how many hold its workers and servers; 1: no transfer crosses a network.
            batch: samples of a step of all workers.
        """
        ...


@dataclass(frozen=True)
class LocalitySpeed:
    """Workers and servers over two rates of links, without overlap.

    A sample takes a worker ``compute_s + exchange_bytes / (sample share of b)``, where b is the
    rate of links within a machine if the whole job is on one machine, else the rate of the network:
    synchronous training goes as fast as its slowest link.

    Source: Yu et al., "Toward Efficient Online Scheduling for Distributed Machine Learning
    Systems", IEEE TNSE 9(4), 2022, as reconstructed: tau + (gamma / F) 2 g / b.

    Attributes:
        compute_s: of a sample.
        exchange_bytes: that a worker sends and receives for each sample of the global batch:
            2 x gradient bytes x workers per server / global batch.
        inside_bytes_per_s, network_bytes_per_s: of a worker's link.
    """

    compute_s: float
    exchange_bytes: float
    inside_bytes_per_s: float
    network_bytes_per_s: float

    def worker_s_per_sample(self, together: bool) -> float:
        """Time of one worker for a sample."""
        rate = self.inside_bytes_per_s if together else self.network_bytes_per_s
        return self.compute_s + self.exchange_bytes / rate

    def samples_per_s(self, workers: int, servers: int, machines: int, batch: int) -> float:
        """Speed of all workers together."""
        return workers / self.worker_s_per_sample(machines == 1)


@dataclass(frozen=True)
class TableSpeed:
    """Measured or predicted speeds by number of workers; straight lines between them.

    Beyond the largest number the speed stays what it is there: nothing is known of it.

    Attributes:
        together: samples/s by workers with all of them on one machine.
        apart: the same over several machines; None: no difference.
    """

    together: Mapping[int, float]
    apart: Mapping[int, float] | None = None
    _lines: dict[bool, tuple[list[int], list[float]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for key, table in ((True, self.together), (False, self.apart or self.together)):
            if not table or min(table) < 1 or min(table.values()) <= 0:
                raise InvalidUsage(f"a table of speeds {dict(table)}; expected samples/s of more "
                                   "than 0 by numbers of workers of at least 1")  # fmt: skip
            counts = sorted(table)
            self._lines[key] = (counts, [table[count] for count in counts])

    def samples_per_s(self, workers: int, servers: int, machines: int, batch: int) -> float:
        """Speed of all workers together."""
        counts, rates = self._lines[machines == 1]
        at = bisect.bisect_left(counts, workers)
        if at == len(counts):
            return rates[-1]
        if counts[at] == workers:
            return rates[at]
        if at == 0:
            return rates[0] * workers / counts[0]
        part = (workers - counts[at - 1]) / (counts[at] - counts[at - 1])
        return rates[at - 1] + part * (rates[at] - rates[at - 1])
