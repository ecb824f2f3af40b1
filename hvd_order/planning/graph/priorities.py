"""Priorities of transfers: among ready transfers, the most urgent goes first."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

__all__ = ["Priorities", "ranked"]

Priorities = dict[str, int]
"""Priority by parameter; 0 goes first, equal priorities in any order."""


def ranked(values: Mapping[str, Any]) -> Priorities:
    """Priorities by ascending value; equal values share the number of transfers before them.

    Source:
        The authors' code for TicTac (``tictac/common.py``). A sender's counter relies on this
        rule: it has counted exactly that many transfers when the first of the group may go.
    """
    priorities: Priorities = {}
    ordered = sorted(values, key=values.__getitem__)
    for _, tied in groupby(ordered, key=values.__getitem__):
        priorities |= dict.fromkeys(tied, len(priorities))
    return priorities
