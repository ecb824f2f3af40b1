"""Rates of flows that share links: strict priorities, and max-min fairness within each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["shares"]

_NOTHING = 1e-12  # of a link's capacity: what subtraction leaves of nothing


def shares(
    loads: Sequence[Mapping[int, float]], levels: Sequence[int], capacity: Sequence[float]
) -> list[float]:
    """Rate of each flow, in bytes a second of what it carries.

    A flow uses several links at once, as a ring of an all-reduce does, and is as fast as the
    narrowest of them lets it. Flows of the same level get equal bytes a second on the link that
    limits them, counted where a flow loads its links most. A flow gets nothing of a link that lower
    levels fill.

    Args:
        loads: for each flow the bytes on a link for each byte that it carries; empty: the flow uses
            no link and has no limit.
        levels: of each flow; the lowest goes first.
        capacity: bytes a second of each link.

    Source: Bertsekas and Gallager, Data Networks, section 6.5.2 (progressive filling), level by
    level. csrc/planning/sampled/links/shared_links.cc does it for flows of two links, one level.
    """
    rates = [math.inf] * len(loads)
    spare = list(capacity)
    for level in sorted(set(levels)):
        open_flows = [i for i, load in enumerate(loads) if levels[i] == level and load]
        most = {i: max(loads[i].values()) for i in open_flows}
        while open_flows:
            weight: dict[int, float] = {}
            for i in open_flows:
                for link, load in loads[i].items():
                    weight[link] = weight.get(link, 0.0) + load / most[i]
            fill = {link: spare[link] / sum_ for link, sum_ in weight.items()}
            narrowest = min(fill, key=fill.__getitem__)
            part = fill[narrowest]
            for i in [i for i in open_flows if narrowest in loads[i]]:
                rates[i] = part / most[i]
                open_flows.remove(i)
                if part < math.inf:
                    for link, load in loads[i].items():
                        left = spare[link] - rates[i] * load
                        spare[link] = left if left >= _NOTHING * capacity[link] else 0.0
    return rates
