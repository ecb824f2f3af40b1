"""Where slices are at first, and their replicas."""

from __future__ import annotations

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.servers.balance.assignment import Assignment, assign, replica_of

MIB = 2**20


def test_even_balances_bytes_and_spreads_neighbours() -> None:
    equal = assign([MIB] * 12, [7, 2, 5])
    assert equal.owner == (7, 2, 5) * 4
    # One server has the large slice alone; the others share what is as much.
    mixed = assign([3 * MIB] + 6 * [MIB], [0, 1, 2])
    assert mixed.loads([3 * MIB] + 6 * [MIB]) == dict.fromkeys(range(3), 3 * MIB)
    assert mixed.owner == (0, 1, 2, 1, 2, 1, 2)


def test_tensors_that_are_most_of_a_model_are_shared() -> None:
    """VGG: one tensor is most of the model."""
    sizes = [2 * MIB] * 5 + [400 * MIB // 200] * 200 + [MIB] * 8
    assert max(assign(sizes, range(4)).loads(sizes).values()) < 1.01 * sum(sizes) / 4


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
