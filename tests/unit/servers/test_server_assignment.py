"""Where slices are at first, and their replicas."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.servers.balance.assignment import (
    Assignment,
    ServedSlice,
    assign,
    replica_of,
)

MIB = 2**20


def slices(*sizes: int, tensors: str = "") -> list[ServedSlice]:
    """``tensors``: a letter for each slice; not given: each is a tensor of its own."""
    return [
        ServedSlice(f"s{i}", tensors[i] if tensors else f"t{i}", size, size // 4)
        for i, size in enumerate(sizes)
    ]


def test_even_balances_bytes_and_spreads_neighbours() -> None:
    equal = assign("even", slices(*[MIB] * 12), [7, 2, 5])
    assert equal.owner == (7, 2, 5) * 4
    # One server has the large slice alone; the others share what is as much.
    mixed = assign("even", slices(3 * MIB, MIB, MIB, MIB, MIB, MIB, MIB), [0, 1, 2])
    assert mixed.loads([3 * MIB] + 6 * [MIB]) == dict.fromkeys(range(3), 3 * MIB)
    assert mixed.owner == (0, 1, 2, 1, 2, 1, 2)


def test_round_robin_keeps_tensors_whole() -> None:
    owner = assign("round_robin", slices(4, 4, 4, 4, 4, 4, tensors="aabccc"), [3, 9]).owner
    assert owner == (3, 3, 9, 3, 3, 3)


def test_hash_is_the_same_in_every_process() -> None:
    program = (
        "from hvd_order.servers.balance.assignment import ServedSlice, assign;"
        "print(assign('hash', [ServedSlice(f's{i}', 't', 4, 1) for i in range(40)], [0, 1, 2]))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    here = assign("hash", [ServedSlice(f"s{i}", "t", 4, 1) for i in range(40)], [0, 1, 2])
    assert runs == {f"{here}\n"}
    assert set(here.owner) == {0, 1, 2}


def test_mxnet_splits_large_tensors_only() -> None:
    small = slices(*[MIB] * 3, tensors="aaa")  # 786,432 elements
    large = slices(*[MIB] * 8, tensors="bbbbbbbb")
    assert len(set(assign("mxnet", small, [1, 2, 4, 8]).owner)) == 1
    assert assign("mxnet", large, [1, 2, 4, 8]).owner == (1, 1, 2, 2, 4, 4, 8, 8)
    assert assign("mxnet", large[:5], [1, 2]).owner == (1, 1, 2, 2, 2)


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
    with pytest.raises(InvalidUsage, match=r"'odd'.*even, hash, mxnet, round_robin"):
        assign("odd", slices(4), [0])
    with pytest.raises(InvalidUsage, match="named once"):
        assign("even", slices(4), [])
    with pytest.raises(InvalidUsage, match="named once"):
        assign("even", slices(4), [1, 1])
    with pytest.raises(InvalidUsage, match="second server"):
        replica_of(Assignment(0, (1, 1)), [1])
