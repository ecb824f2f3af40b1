"""Replicas of slices; where slices are at first is a property (test_server_assignment_property)."""

from __future__ import annotations

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.servers.balance.assignment import Assignment, assign, replica_of


def test_replicas_of_each_owner_go_to_all_others() -> None:
    assignment = Assignment(3, (0, 4, 6) * 8)
    replicas = replica_of(assignment, [0, 4, 6])
    for owner in (0, 4, 6):
        takers = [replicas[i] for i in range(24) if assignment.owner[i] == owner]
        assert sorted(takers.count(server) for server in (0, 4, 6)) == [0, 4, 4]
    # A server more: replicas that may stay, do.
    assert replica_of(assignment, [0, 4, 6, 9], previous=replicas) == replicas
    # Slice 0 moves to where its replica was.
    moved = assignment.changed_to((replicas[0], *assignment.owner[1:]))
    after = replica_of(moved, [0, 4, 6], previous=replicas)
    assert after[0] != moved.owner[0]
    assert after[1:] == replicas[1:]


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidUsage, match="named once"):
        assign([4], [])
    with pytest.raises(InvalidUsage, match="named once"):
        assign([4], [1, 1])
    with pytest.raises(InvalidUsage, match="second server"):
        replica_of(Assignment(0, (1, 1)), [1])
