"""Priorities of transfers: among ready transfers, the most urgent goes first."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

__all__ = ["Priorities", "ranked", "within_servers"]

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


def within_servers(priorities: Priorities, server_of: Mapping[str, Any]) -> Priorities:
    """Renumbers priorities from 0 on each server: a server has only its own transfers.

    Args:
        server_of: the server that holds each parameter, by parameter name.
    """
    result: Priorities = {}
    for server in dict.fromkeys(server_of[name] for name in priorities):
        mine = {name: p for name, p in priorities.items() if server_of[name] == server}
        result |= ranked(mine)
    return result
