"""Merging of gradients that are sent in order of arrival into larger messages.

A message of n bytes takes ``a + b n``. Merging saves one a, but a gradient that waits for the next
one may leave the link idle. MG-WFBP decides pair by pair: it merges a gradient with the next one if
the next one is ready before the message could have started and paid its a. This is best for one
pair. The paper calls it optimal, but for several pairs it is not: with a = 1, three gradients ready
at 0, 0.9 and 1.8 s that take 5 s each are all merged and end at 17.8 s, while the first alone and
the other two together end at 17 s. `merge_best` is the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from hvd_order.base.link.link_model import LinkModel, transfer_s
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.priorities import Priorities
from hvd_order.planning.orders.slicing import PlannedSlice, SlicePart
from hvd_order.planning.steps.program import gradient_transfers

__all__ = ["best_merge", "merge_best", "merge_pairs", "mg_wfbp"]

Groups = list[list[int]]


def merge_pairs(ready_s: Sequence[float], size_bytes: Sequence[int], link: LinkModel) -> Groups:
    """MG-WFBP's rule, as published.

    Args:
        ready_s: time at which each gradient is computed, ascending.
        size_bytes: size of each gradient.
        link: a is ``slice_cost_s``, b is ``seconds_per_byte``.

    Returns:
        Positions of the gradients in each message, in the order of sending.

    Source:
        Shi, Chu, Li, "MG-WFBP", INFOCOM 2019 (arXiv 1912.09268), algorithm 1, in one pass: the
        start of a message depends only on the messages before it.
    """
    groups: Groups = []
    group: list[int] = []
    link_free_s = 0.0
    for i, ready in enumerate(ready_s):
        group.append(i)
        start_s = max(link_free_s, ready)
        is_last = i + 1 == len(ready_s)
        if is_last or ready_s[i + 1] >= start_s + link.slice_cost_s:
            link_free_s = start_s + transfer_s(sum(size_bytes[k] for k in group), link)
            groups.append(group)
            group = []
    return groups


def merge_best(ready_s: Sequence[float], size_bytes: Sequence[int], link: LinkModel) -> Groups:
    """Merges neighbours such that the last message ends as early as possible.

    The best end of the first j gradients is the minimum over all last messages i..j. Such a message
    starts at the best end of the gradients before i or when j is ready, whichever is later. O(n^2).

    Args:
        ready_s, size_bytes, link: same as in :func:`merge_pairs`, as is the result.
    """
    sums = [0, *accumulate(size_bytes)]
    ends = [0.0]
    firsts = [0]
    for j, ready in enumerate(ready_s):
        least_s, first = math.inf, j
        for i in range(j, -1, -1):
            end_s = max(ends[i], ready) + transfer_s(sums[j + 1] - sums[i], link)
            if end_s < least_s:
                least_s, first = end_s, i
        ends.append(least_s)
        firsts.append(first)
    groups: Groups = []
    after = len(ready_s)
    while after:
        groups.append(list(range(firsts[after], after)))
        after = firsts[after]
    return groups[::-1]


def mg_wfbp(graph: Graph, link: LinkModel, priorities: Priorities) -> list[PlannedSlice]:
    """The messages of :func:`merge_pairs`, in order of arrival.

    Args:
        priorities: unused: gradients are sent in order of arrival.
    """
    del priorities
    return _messages(graph, link, merge_pairs)


def best_merge(graph: Graph, link: LinkModel, priorities: Priorities) -> list[PlannedSlice]:
    """The messages of :func:`merge_best`, in order of arrival.

    Args:
        priorities: unused.
    """
    del priorities
    return _messages(graph, link, merge_best)


def _messages(
    graph: Graph,
    link: LinkModel,
    merge: Callable[[Sequence[float], Sequence[int], LinkModel], Groups],
) -> list[PlannedSlice]:
    arriving = sorted(gradient_transfers(graph), key=lambda transfer: transfer.release_s)
    groups = merge(
        [transfer.release_s for transfer in arriving],
        [transfer.size_bytes for transfer in arriving],
        link,
    )
    return [
        PlannedSlice(
            tuple(SlicePart(arriving[i].name, 0, arriving[i].size_bytes) for i in group), number
        )
        for number, group in enumerate(groups)
    ]
