"""Orders between jobs and inside them, by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, cast, get_args

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.links.cassini import shifts_of
from hvd_order.cluster.links.crux import crux_levels
from hvd_order.cluster.links.jobs import LinkJob, LinkSharing
from hvd_order.cluster.links.shared import alone_s
from hvd_order.cluster.links.step import Inside

__all__ = ["Between", "orders_of", "sharing_of"]

Between = Literal["fair", "crux", "cassini"]
"""Order of the transfers of different jobs.

fair: max-min fair sharing, as connections do.
crux: strict priorities by Crux, on 8 levels.
cassini: fair sharing, and time shifts by CASSINI. Where CASSINI does not take the placement, none.
"""

_INTERVALS = 50  # of the shortest iteration


def orders_of(name: str) -> tuple[Between, Inside]:
    """Order between jobs and inside them, of ``crux`` or ``crux+buckets``.

    Raises:
        InvalidUsage: there is no such order.
    """
    between, plus, inside = name.partition("+")
    for what, given, known in (
        ("between", between, get_args(Between)),
        ("inside", inside if plus else "ordered", get_args(Inside)),
    ):
        if given not in known:
            raise InvalidUsage(f"order {given!r} {what} jobs in {name!r}; expected one of "
                               f"{', '.join(known)}")  # fmt: skip
    return cast("Between", between), cast("Inside", inside or "ordered")


def sharing_of(
    between: Between, jobs: Sequence[LinkJob], capacity: Sequence[float], seed: int = 0
) -> LinkSharing:
    """The order between these jobs.

    Args:
        seed: of the moments at which jobs begin, within their iterations, unless shifts set them,
            and of Crux' sampled orders.

    """
    draw = random.Random(seed)
    iterations_s = [alone_s(job.step, job.link_s(capacity) / job.step.size_bytes)
                    if job.load else job.step.compute_s for job in jobs]  # fmt: skip
    begin_s = [draw.random() * seconds for seconds in iterations_s]
    fair = LinkSharing.fair(len(jobs), begin_s)
    if between == "crux":
        return LinkSharing(crux_levels(jobs, capacity, seed=seed), begin_s, fair.every_s)
    if between == "cassini":
        shifts = shifts_of(jobs, capacity, min(iterations_s) / _INTERVALS)
        return fair if shifts is None else shifts.sharing()
    return fair
