"""TAC: timing-aware communication order.

Two transfers A and B, each of which unlocks its own compute before a common op, take

    A then B:  M_A + max(P_A, M_B) + P_B        B then A:  M_B + max(P_B, M_A) + P_A

so A goes first if min(P_B, M_A) < min(P_A, M_B): Johnson's rule for a flow shop of two machines,
the link and the processor. TAC sends the transfer that goes first among all unsent transfers,
treats it as arrived, and compares again.

The printed Algorithm 3 has the opposite sign in that comparison; Eq. 6 and the authors' code have
it as above. With ties, which go to the smaller M+, "goes first" is not an order: with (P, M, M+) of
X = (4, 4, 9), Y = (3, 4, 4) and Z = (1, 1, 7), X precedes Y, Y precedes Z and Z precedes X. The
result of a sort or scan would depend on the input order. So this code breaks ties only among those
transfers that no other precedes by Eq. 6 itself, which has no circles: here X and Z, hence Z.
Without a circle, the result is the minimum of the paper.
"""

from __future__ import annotations

import math

from hvd_order.base.link.link_model import LinkModel, transfer_s
from hvd_order.planning.graph.graph import Graph, members
from hvd_order.planning.graph.priorities import Priorities
from hvd_order.planning.graph.properties import Outstanding

__all__ = ["tac"]

_TICKS_PER_S = 10**12  # times are whole numbers of picoseconds, so that equal sums are equal


def tac(graph: Graph, link: LinkModel) -> Priorities:
    """Orders transfers by Eq. 6, one after the other; no two share a priority.

    Remaining ties go to the parameter that the graph lists first. 4,655 ops with 363 parameters
    (ResNet-152) take about 0.1 s.

    Args:
        link: gives the time of each transfer alone.

    Source:
        TicTac (MLSys 2019), section 4.3, Eq. 6; ``tictac/tac.py``.
    """
    state = Outstanding(
        graph,
        [_ticks(transfer_s(parameter.size_bytes, link)) for parameter in graph.parameters],
        [_ticks(op.duration_s) for op in graph.ops],
    )
    priorities: Priorities = {}
    while state.left:
        first = _next(state)
        priorities[graph.parameters[first].name] = len(priorities)
        state.arrive(first)
    return priorities


def _ticks(seconds: float) -> int:
    return round(seconds * _TICKS_PER_S)


def _next(state: Outstanding) -> int:
    among = _unpreceded(state)
    if among & (among - 1):
        among = state.least_impending(among)
    return (among & -among).bit_length() - 1


def _unpreceded(state: Outstanding) -> int:
    """The outstanding transfers that no other precedes by Eq. 6.

    B precedes A if min(P_A, M_B) < min(P_B, M_A), that is if M_B < P_B and M_B < M_A, or if
    P_A < P_B and P_A < M_A. Only the B with least M_B and the B with largest P_B matter.
    """
    left = members(state.left)
    shortest = min((state.M[i] for i in left if state.M[i] < state.P[i]), default=math.inf)
    most = max(state.P[i] for i in left)
    found = 0
    for i in left:
        if state.M[i] <= shortest and (state.P[i] >= state.M[i] or state.P[i] == most):
            found |= 1 << i
    return found
