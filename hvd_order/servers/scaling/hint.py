"""Advice whether a job should have one server more or less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from hvd_order.servers.balance.balancer import Balancer
from hvd_order.servers.balance.rebalance import shortest_s

__all__ = ["MATTERS", "Hint", "hint_for", "scaling_hint"]

MATTERS = 0.05
"""Share of the communication time; a smaller change is not worth starting or ending a process."""

_STRAGGLER = 0.3  # times the median speed


@dataclass(frozen=True)
class Hint:
    """A recommendation.

    Attributes:
        action: ``scale_out``: one server more; ``scale_in``: without ``server``; ``replace``:
            another server instead of ``server``.
        server: number of the server; None for ``scale_out``.
        before_s: predicted communication time of a step, with slices where they should be.
        after_s: the same time after the action.
    """

    action: str
    server: int | None
    before_s: float
    after_s: float


def hint_for(balancer: Balancer, hidden_s: float, spare: int) -> Hint | None:
    """Returns advice on the number of servers; None also while it is unclear.

    Args:
        balancer: has the sizes of slices and speeds of servers.
        hidden_s: communication time hidden under the computation of a step.
        spare: servers that could be started.
    """
    if not balancer.is_steady:
        return None
    return scaling_hint(balancer.sizes, balancer.step_speeds(), hidden_s, spare)


def scaling_hint(
    sizes: Sequence[int], speeds: Mapping[int, float], hidden_s: float, spare: int
) -> Hint | None:
    """Advises one server more if communication is exposed, one less if steps would not suffer.

    A new server is expected to have the mean speed of the existing ones, and a replacement the
    median. Communication has to exceed the hidden time by 5 % before more servers are requested,
    and a server has to contribute less than 5 % before it is removed, so that one action does not
    undo the other.

    Args:
        sizes: bytes by slice.
        speeds: bytes a second by server; positive.
        hidden_s: communication time hidden under the computation of a step.
        spare: servers that could be started.

    Source:
        Chen et al., "Elastic parameter server load distribution", SoCC 2020, as reconstructed
        without its text; the rule that hidden communication needs no servers is ours.
    """
    before_s = shortest_s(sizes, speeds)
    slowest = min(speeds, key=lambda server: speeds[server])
    rest = {server: speed for server, speed in speeds.items() if server != slowest}
    new = max(speeds) + 1  # any unused number
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
