"""Priorities of transfers: which goes first when several could."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

__all__ = ["Priorities", "ranked", "within_servers"]

Priorities = dict[str, int]
"""By parameter; 0 goes first, and equal ones in any order."""


def ranked(values: Mapping[str, Any]) -> Priorities:
    """Smaller values first; equal ones share the number of transfers that precede them all.

    Source:
        The authors' code for TicTac (``tictac/common.py``), which a sender's counter relies on: it
        has passed exactly that many transfers when the first of the group may go.
    """
    priorities: Priorities = {}
    ordered = sorted(values, key=values.__getitem__)
    for _, tied in groupby(ordered, key=values.__getitem__):
        priorities |= dict.fromkeys(tied, len(priorities))
    return priorities


def within_servers(priorities: Priorities, server_of: Mapping[str, Any]) -> Priorities:
    """The same order, counted by each server from 0: a server sees its own transfers only.

    Args:
        server_of: which server holds the parameter, by name.
    """
    result: Priorities = {}
    for server in dict.fromkeys(server_of[name] for name in priorities):
        mine = {name: p for name, p in priorities.items() if server_of[name] == server}
        result |= ranked(mine)
    return result
