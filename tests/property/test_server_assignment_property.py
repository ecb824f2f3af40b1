"""What holds of every first assignment, its replicas, and of levelling."""

from __future__ import annotations

from helpers.property_cases import cases
from hypothesis import assume, given
from hypothesis import strategies as st

from hvd_order.servers.balance.assignment import Assignment, assign, replica_of
from hvd_order.servers.balance.rebalance import longest_s, moves_between, rebalance, taken_over

slice_bytes = st.lists(
    st.one_of(st.integers(1, 10**6), st.sampled_from([2**19, 2**20])), max_size=60
)
server_lists = st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True)
speed_tables = st.dictionaries(
    st.integers(0, 30), st.sampled_from([0.1, 0.25, 0.5, 1.0, 3.0]), min_size=2, max_size=6
)
LITTLE = 1e-9  # rounding


@cases(200)
@given(sizes=slice_bytes, servers=server_lists)
def test_every_slice_has_an_owner(sizes: list[int], servers: list[int]) -> None:
    first = assign(sizes, servers)
    assert first.version == 0
    assert len(first.owner) == len(sizes)
    assert set(first.owner) <= set(servers)
    assert sum(first.loads(sizes).values()) == sum(sizes)
    assert assign(sizes, servers) == first


@cases(300)
@given(sizes=slice_bytes, servers=server_lists)
def test_even_is_even_in_all_and_in_every_stretch(sizes: list[int], servers: list[int]) -> None:
    assume(sizes)
    owner = assign(sizes, servers).owner
    largest = max(sizes)
    reached = [dict.fromkeys(servers, 0)]
    for size, server in zip(sizes, owner, strict=True):
        reached.append({**reached[-1], server: reached[-1][server] + size})
    assert max(reached[-1].values()) - min(reached[-1].values()) <= largest
    # Whatever stretch of the consumption order is sent, all servers have work, but for the last
    # few slices.
    for begin in range(len(reached)):
        for end in range(begin, len(reached)):
            work = [reached[end][server] - reached[begin][server] for server in servers]
            assert max(work) - min(work) <= 5 * largest


@cases(100)
@given(count=st.integers(1, 60), size=st.integers(1, 9), servers=server_lists)
def test_even_gives_equal_neighbours_to_different_servers(
    count: int, size: int, servers: list[int]
) -> None:
    owner = assign([size] * count, servers).owner
    for at in range(count - len(servers) + 1):
        assert set(owner[at : at + len(servers)]) == set(servers)


@cases(200)
@given(sizes=slice_bytes, servers=server_lists, weighed=st.booleans(), data=st.data())
def test_a_dead_servers_slices_are_shared_alike(
    sizes: list[int], servers: list[int], weighed: bool, data: st.DataObject
) -> None:
    assume(len(servers) > 1)
    owners = data.draw(st.lists(st.sampled_from(servers), min_size=len(sizes), max_size=len(sizes)))
    assignment = Assignment(0, tuple(owners))
    weights = sizes if weighed else [1] * len(sizes)
    replicas = replica_of(assignment, servers, weights)
    for owner in set(assignment.owner):
        share = {server: 0 for server in servers if server != owner}
        own = [i for i, server in enumerate(assignment.owner) if server == owner]
        for i in own:
            share[replicas[i]] += weights[i]  # no KeyError: never the owner, always alive
        assert max(share.values()) - min(share.values()) <= max(weights[i] for i in own)
    # When it has happened, the replicas of others stay where they are.
    dead, *living = servers
    if len(living) > 1:
        after = Assignment(
            1,
            tuple(
                replica if owner == dead else owner
                for owner, replica in zip(assignment.owner, replicas, strict=True)
            ),
        )
        again = replica_of(after, living, weights, replicas)
        assert all(a in living and a != o for a, o in zip(again, after.owner, strict=True))
        assert all(
            again[i] == replicas[i]
            for i in range(len(sizes))
            if assignment.owner[i] != dead and replicas[i] != dead
        )


@st.composite
def uneven(draw: st.DrawFn) -> tuple[list[int], list[int], dict[int, float]]:
    """Owners, sizes and speeds."""
    speeds = draw(speed_tables)
    sizes = draw(slice_bytes)
    owners = st.sampled_from(sorted(speeds))
    return draw(st.lists(owners, min_size=len(sizes), max_size=len(sizes))), sizes, speeds


@cases(400)
@given(case=uneven(), most=st.sampled_from([None, 0, 10**6]))
def test_levelling_helps_moves_little_and_ends(
    case: tuple[list[int], list[int], dict[int, float]], most: int | None
) -> None:
    owner, sizes, speeds = case
    after = rebalance(owner, sizes, speeds, most_bytes=float("inf") if most is None else most)
    moves = moves_between(owner, after, sizes)
    assert set(after) <= set(speeds)
    before_s, after_s = (longest_s(each, sizes, speeds) for each in (owner, after))
    assert after_s <= before_s
    assert not moves or after_s < before_s or most is not None
    ideal_s = sum(sizes) / sum(speeds.values())
    largest = max(sizes, default=0)
    if most is None:
        # No other server could take another slice without being as late.
        assert after_s <= max(1.02 * ideal_s, ideal_s + largest / min(speeds.values()))
        assert rebalance(after, sizes, speeds) == after
    else:
        assert len(moves) <= 1 or sum(move.size_bytes for move in moves) <= most


@cases(200)
@given(case=uneven(), data=st.data())
def test_who_leaves_gives_everything_and_nobody_else_anything(
    case: tuple[list[int], list[int], dict[int, float]], data: st.DataObject
) -> None:
    owner, sizes, speeds = case
    gone = data.draw(st.sampled_from(sorted(speeds)))
    living = {server: speed for server, speed in speeds.items() if server != gone}
    after = taken_over(owner, sizes, living)
    assert [move.slice for move in moves_between(owner, after, sizes)] == [
        i for i, server in enumerate(owner) if server == gone
    ]
    assert set(after) <= set(living)
