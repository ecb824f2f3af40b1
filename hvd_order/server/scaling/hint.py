"""Whether a job should have a server more or less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from hvd_order.server.balance.balancer import Balancer
from hvd_order.server.balance.rebalance import shortest_s

__all__ = ["MATTERS", "Hint", "hint_for", "scaling_hint"]

MATTERS = 0.05
"""Of the communication time; less is not worth starting or ending a process."""

_STRAGGLER = 0.3  # times the median speed


@dataclass(frozen=True)
class Hint:
    """A recommendation.

    Attributes:
        action: ``scale_out``: one server more; ``scale_in``: without ``server``; ``replace``:
            another one instead of ``server``.
        server: which; None for ``scale_out``.
        before_s: predicted communication of a step, with slices where they should be.
        after_s: the same after the action.
    """

    action: str
    server: int | None
    before_s: float
    after_s: float


def hint_for(balancer: Balancer, hidden_s: float, spare: int) -> Hint | None:
    """Whether another number of servers would be better; None as well while that is unclear.

    Args:
        balancer: knows sizes of slices and speeds of servers.
        hidden_s: so much communication hides under the computation of a step.
        spare: servers that could be started.
    """
    if not balancer.settled:
        return None
    return scaling_hint(balancer.sizes, balancer.step_speeds(), hidden_s, spare)


def scaling_hint(
    sizes: Sequence[int], speeds: Mapping[int, float], hidden_s: float, spare: int
) -> Hint | None:
    """One server more if communication shows, one less if nobody would notice.

    A new server is expected to be as fast as the mean of those there are, a replacement as the
    median. Communication has to stick out by 5 % before more servers are asked for, and a server
    has to be worth less than 5 % before it is given up, so that one does not undo the other.

    Args:
        sizes: bytes by slice.
        speeds: bytes a second by server; positive.
        hidden_s: so much communication hides under the computation of a step.
        spare: servers that could be started.

    Source:
        Chen et al., "Elastic parameter server load distribution", SoCC 2020, as reconstructed
        without its text; that what is hidden needs no servers is ours.
    """
    before_s = shortest_s(sizes, speeds)
    slowest = min(speeds, key=lambda server: speeds[server])
    rest = {server: speed for server, speed in speeds.items() if server != slowest}
    new = max(speeds) + 1  # any number that is not taken
    if spare > 0 and before_s > (1 + MATTERS) * hidden_s:
        middle = median(speeds.values())
        replaced_s = shortest_s(sizes, {**rest, new: middle})
        if speeds[slowest] < _STRAGGLER * middle and replaced_s < (1 - MATTERS) * before_s:
            return Hint("replace", slowest, before_s, replaced_s)
        more_s = shortest_s(sizes, {**speeds, new: mean(speeds.values())})
        if more_s < (1 - MATTERS) * before_s:
            return Hint("scale_out", None, before_s, more_s)
    if rest:
        less_s = shortest_s(sizes, rest)
        if max(less_s, hidden_s) < (1 + MATTERS) * max(before_s, hidden_s):
            return Hint("scale_in", slowest, before_s, less_s)
    return None
