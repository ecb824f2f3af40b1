"""A job's iteration as its links see it: computation in a row, and transfers beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.graph.graph import Graph

__all__ = ["Inside", "LinkStep", "LinkTransfer", "step_of"]

Inside = Literal["buckets", "arrival", "ordered"]
"""Order of the transfers of one job.

buckets: DistributedDataParallel: buckets in the order of backward, all awaited before the next
    iteration.
arrival: tensors in the order of backward; the next iteration begins meanwhile, and each of its ops
    waits for what it reads.
ordered: as ``arrival``, but what is read first goes first, also ahead of a transfer under way.
"""


@dataclass(frozen=True)
class LinkTransfer:
    """Bytes that are summed over the workers.

    Attributes:
        size_bytes: of the gradient.
        after: op that produces it.
        before: op of the next iteration that needs it; not behind ``after``.
    """

    size_bytes: float
    after: int
    before: int


@dataclass(frozen=True)
class LinkStep:
    """One iteration of each worker of a job; the next one follows.

    Attributes:
        ops_s: durations, one op after the other.
        transfers: in the order in which they go if all of them are ready.
    """

    ops_s: tuple[float, ...]
    transfers: tuple[LinkTransfer, ...]

    def __post_init__(self) -> None:
        if not all(0 <= seconds < math.inf for seconds in self.ops_s) or not sum(self.ops_s) > 0:
            raise InvalidUsage(f"a step of ops that take {self.ops_s} s; expected at least one "
                               "that takes time, and none a negative one")  # fmt: skip
        for one in self.transfers:
            if not 0 <= one.before <= one.after < len(self.ops_s) or not one.size_bytes >= 0:
                raise InvalidUsage(
                    f"{one} in a step of {len(self.ops_s)} ops; expected 0 <= before <= after, "
                    "both of them ops of the step, and a size of at least 0"
                )

    @property
    def compute_s(self) -> float:
        """Duration of all ops."""
        return math.fsum(self.ops_s)

    @property
    def size_bytes(self) -> float:
        """Bytes of all gradients."""
        return math.fsum(one.size_bytes for one in self.transfers)


@lru_cache(maxsize=256)
def step_of(
    graph: Graph, inside: Inside, bucket_bytes: int = 25 * 2**20, first_bytes: int = 2**20
) -> LinkStep:
    """The step of a recorded or made graph, whose ops run in program order.

    The ops of updates are left out. A parameter that no op reads is needed when its gradient is
    produced again.

    Args:
        bucket_bytes, first_bytes: a bucket is closed when it has as much; the first one, and the
            others. PyTorch's defaults.

    Raises:
        InvalidUsage: the graph computes nothing.

    Source of the buckets: torch/csrc/distributed/c10d/reducer.cpp.
    """
    kept = [i for i, op in enumerate(graph.ops) if op.phase != "update" or op.produces]
    place = {op: i for i, op in enumerate(kept)}
    found = []
    for parameter, readers, producers in zip(
        graph.parameters, graph.readers, graph.producers, strict=True
    ):
        if producers:
            after = place[producers[-1]]
            before = min((place[op] for op in readers if op in place), default=after)
            found.append(LinkTransfer(parameter.size_bytes, after, min(before, after)))
    # Within an op the last parameter comes first, as in DistributedDataParallel.
    found.reverse()
    found.sort(key=lambda one: one.after)
    if inside == "buckets":
        found = _buckets(found, bucket_bytes, first_bytes)
    elif inside == "ordered":
        found.sort(key=lambda one: one.before)
    return _merged([graph.ops[op].duration_s for op in kept], found)


def _buckets(
    found: Sequence[LinkTransfer], bucket_bytes: int, first_bytes: int
) -> list[LinkTransfer]:
    buckets: list[LinkTransfer] = []
    filled = 0.0
    limit = first_bytes
    for i, one in enumerate(found):
        filled += one.size_bytes
        if filled >= limit or i == len(found) - 1:
            buckets.append(LinkTransfer(filled, one.after, 0))
            filled, limit = 0.0, bucket_bytes
    return buckets


def _merged(ops_s: Sequence[float], transfers: Sequence[LinkTransfer]) -> LinkStep:
    """Makes one op of ops that no transfer begins or ends between: fewer events to simulate."""
    begins = {0} | {one.before for one in transfers} | {one.after + 1 for one in transfers}
    begins = {i for i in begins if i < len(ops_s)}
    group: list[int] = []
    for i in range(len(ops_s)):
        group.append((group[-1] if group else -1) + (i in begins))
    sums = [0.0] * (group[-1] + 1 if group else 0)
    for i, seconds in zip(group, ops_s, strict=True):
        sums[i] += seconds
    return LinkStep(
        tuple(sums),
        tuple(LinkTransfer(t.size_bytes, group[t.after], group[t.before]) for t in transfers),
    )
