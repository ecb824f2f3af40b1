"""TicTac's properties of a transfer: P, M and M+, updated while transfers arrive.

With R the parameters that have not arrived, and ``dep`` what an op needs (``Graph.needs``):

* M of an op is the time of all transfers in both dep and R; M of a transfer is its own time;
* P of a transfer is the time of all ops that need it and no other member of R: it alone unlocks
  them;
* M+ of a transfer is the least M of all ops that need it *and* other members of R; infinite if no
  op does.

The paper computes all three anew for every transfer (UpdateProperties). Here ops with the same dep
are one *group*, and an arrival touches only the groups that need it; a training graph has about as
many groups as parameters, since every op of the backward pass needs all of them.

Source:
    Hashemi, Abdu Jyothi, Campbell, "TicTac", MLSys 2019 (arXiv 1803.03288), section 3 and 4.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from hvd_order.planning.graph.graph import Graph, members

__all__ = ["Outstanding", "impending"]


class Outstanding:
    """Transfers that have not arrived, with P, M and M+ of each.

    Attributes:
        left: their positions in ``graph.parameters``, as a bit mask.
        M: time of each transfer.
        P: time of the ops that each transfer alone unlocks.
    """

    def __init__(
        self, graph: Graph, transfer_times: Sequence[int], op_times: Sequence[int]
    ) -> None:
        """Starts with all transfers outstanding.

        Args:
            transfer_times, op_times: times by position. Whole numbers in any unit: sums are exact,
                so values that are equal in the paper are equal here.
        """
        work: defaultdict[int, int] = defaultdict(int)
        for mask, time in zip(graph.needs, op_times, strict=True):
            work[mask] += time
        work.pop(0, None)  # needs no transfer and runs at once

        self.left = (1 << len(graph.parameters)) - 1
        self.M = list(transfer_times)
        self.P = [0] * len(graph.parameters)
        self._masks = list(work)
        self._work = list(work.values())
        self._group_M: list[int] = []
        self._missing: list[int] = []  # number of transfers that a group waits for
        self._groups_of: list[list[int]] = [[] for _ in graph.parameters]
        self._joins: dict[int, None] = {}  # groups that wait for several, in order
        for group, mask in enumerate(self._masks):
            needed = members(mask)
            self._group_M.append(sum(transfer_times[i] for i in needed))
            self._missing.append(len(needed))
            for i in needed:
                self._groups_of[i].append(group)
            if len(needed) > 1:
                self._joins[group] = None
            else:
                self.P[needed[0]] += self._work[group]

    def arrive(self, transfer: int) -> None:
        """Removes a transfer from R."""
        self.left &= ~(1 << transfer)
        for group in self._groups_of[transfer]:
            self._missing[group] -= 1
            self._group_M[group] -= self.M[transfer]
            if self._missing[group] == 1:
                del self._joins[group]
                last = (self._masks[group] & self.left).bit_length() - 1
                self.P[last] += self._work[group]

    def impending(self) -> list[float]:
        """M+ of each transfer; infinite for those that have arrived."""
        joins = ((self._group_M[group], self._masks[group]) for group in self._joins)
        return impending(joins, self.left, len(self.M))

    def least_impending(self, among: int) -> int:
        """The subset of a set of transfers with the least M+."""
        least: float = math.inf
        found = 0
        for group in self._joins:
            common = self._masks[group] & among
            if common and self._group_M[group] <= least:
                found = common if self._group_M[group] < least else found | common
                least = self._group_M[group]
        return found or among


def impending(joins: Iterable[tuple[int, int]], among: int, count: int) -> list[float]:
    """M+ by position; infinite for transfers that no joint op needs.

    Args:
        joins: (M, set of transfers) of ops that wait for several transfers.
        among: set of the transfers that have not arrived.
        count: number of all transfers.
    """
    result = [math.inf] * count
    for least, mask in sorted(joins):
        for i in members(mask & among):
            result[i] = least
        among &= ~mask
    return result
