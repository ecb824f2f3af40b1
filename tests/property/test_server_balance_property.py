"""Whatever servers do: every slice has one living owner, and training is hardly ever slower."""

from __future__ import annotations

import random

from helpers.oracles.simulated_servers import SimulatedServers, drive
from helpers.property_cases import Choices, cases, choices
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.servers.balance.assignment import assign
from hvd_order.servers.balance.balancer import Balancer, Rebalance
from hvd_order.servers.balance.rebalance import longest_s, rebalance, shortest_s
from hvd_order.servers.scaling.hint import scaling_hint

FULL = 1e9
size_lists = st.lists(st.integers(10**5, 2 * 10**6), min_size=1, max_size=60)
seeds = st.integers(0, 2**16)


def balancer_of(sizes: list[int], servers: int, seed: int) -> Balancer:
    return Balancer(assign(sizes, range(servers)), sizes, range(servers), seed=seed)


@cases(150)
@given(sizes=size_lists, servers=st.integers(1, 6), choose=choices(), seed=seeds)
def test_owners_live_and_changes_say_what_they_change(
    sizes: list[int], servers: int, choose: Choices, seed: int
) -> None:
    """Any figures at all, and servers that come and go."""
    balancer = balancer_of(sizes, servers, seed)
    living = set(range(servers))
    owner, version = list(balancer.assignment.owner), 0

    def check(change: Rebalance | None) -> None:
        nonlocal version
        if change is not None:
            version += 1
            for move in change.moves:
                assert (owner[move.slice], sizes[move.slice]) == (move.source, move.size_bytes)
                assert move.target != move.source
                owner[move.slice] = move.target
            assert change.assignment == balancer.assignment
        assert balancer.assignment.version == version
        assert balancer.assignment.owner == tuple(owner)
        assert set(owner) <= living

    slow = dict.fromkeys(range(20), 1)
    for _ in range(150):
        if choose.below(20) == 0:
            event = choose.below(3)
            if event == 0:
                living = living | {choose.below(20)}
            elif event == 1 and len(living) > 1:
                living = living - {choose.one_of(sorted(living))}
            slow[choose.below(20)] = choose.one_of([1, 1, 2, 4, 100])
            check(balancer.with_servers(living))
        loads = balancer.assignment.loads(sizes)
        figures = {
            server: (loads.get(server, 0), loads.get(server, 0) * slow[server] / FULL)
            for server in range(20)
            if choose.below(50)
        }
        check(balancer.step(figures, choose.one_of([version, version, version, None])))


@cases(60)
@given(
    sizes=st.lists(st.integers(10**5, 2 * 10**6), min_size=24, max_size=60),
    servers=st.integers(2, 6),
    seed=seeds,
    data=st.data(),
)
def test_any_constant_speeds_are_balanced(
    sizes: list[int], servers: int, seed: int, data: st.DataObject
) -> None:
    rates = st.sampled_from([FULL / 10, FULL / 4, FULL / 2, FULL])
    speeds = {server: data.draw(rates) for server in range(servers)}
    balancer = balancer_of(sizes, servers, seed)
    simulated = SimulatedServers(sizes, dict(speeds), noise=0.02, random=random.Random(seed))
    split_s = simulated.step_s(balancer.assignment.owner)
    run = drive(balancer, simulated, 80, lag=1)
    if run.changes and run.changes[-1][1].why == "probe":
        return  # a guess is under way
    best_s = longest_s(rebalance(balancer.assignment.owner, sizes, speeds), sizes, speeds)
    last_s = simulated.step_s(balancer.assignment.owner)
    assert last_s <= 1.01 * split_s
    assert last_s < 1.25 * best_s  # a server that is not clearly late is left alone
    assert last_s >= 0.999 * shortest_s(sizes, speeds)


@cases(25)
@given(
    servers=st.integers(2, 6),
    slices=st.integers(24, 60),
    period=st.sampled_from([3, 8, 15, 40, 200]),
    noise=st.sampled_from([0.0, 0.05]),
    seed=seeds,
)
def test_changing_speeds_never_cost_much(
    servers: int, slices: int, period: int, noise: float, seed: int
) -> None:
    """Others use the servers' machines, on and off."""
    pick = random.Random(seed)
    sizes = [10**6] * slices
    speeds_at: dict[int, dict[int, float]] = {}
    step = 0
    while step < 1500:
        speeds_at[step] = dict.fromkeys(range(servers), FULL)
        for server in pick.sample(range(servers), pick.choice([0, 1, 1, 2])):
            speeds_at[step][server] = FULL * pick.choice([0.1, 0.25, 0.5])
        step += 1 + int(pick.expovariate(1 / period))
    balancer = balancer_of(sizes, servers, seed)
    split = balancer.assignment.owner
    simulated = SimulatedServers(sizes, dict(speeds_at[0]), noise=noise, random=pick)
    run = drive(balancer, simulated, 1500, speeds_at, lag=1)
    split_s = 0.0
    for step in range(1500):
        simulated.speeds.update(speeds_at.get(step, {}))
        split_s += simulated.step_s(split)
    # Where speeds have changed again before slices have moved, that was for nothing.
    assert sum(run.steps_s) < (1.25 if period < 40 else 1.02) * split_s


@cases(12)
@given(
    sizes=st.lists(st.integers(10**5, 2 * 10**6), min_size=1, max_size=60),
    servers=st.integers(2, 6),
    seed=seeds,
)
def test_under_noise_alone_slices_stay(sizes: list[int], servers: int, seed: int) -> None:
    balancer = balancer_of(sizes, servers, seed)
    speeds = dict.fromkeys(range(servers), FULL)
    simulated = SimulatedServers(sizes, speeds, noise=0.05, random=random.Random(seed))
    split_s = simulated.step_s(balancer.assignment.owner)
    run = drive(balancer, simulated, 2000)
    assert sum(run.steps_s) < 1.02 * 2000 * split_s
    assert len(run.of("correction")) <= 3  # the first assignment may have been worth one
    assert len(run.of("probe")) < 30


@cases(150)
@given(
    sizes=size_lists, servers=st.integers(1, 6), new=st.integers(1, 3), seed=seeds, data=st.data()
)
def test_new_servers_get_their_share_and_nothing_else_moves(
    sizes: list[int], servers: int, new: int, seed: int, data: st.DataObject
) -> None:
    balancer = balancer_of(sizes, servers, seed)
    speeds = {server: data.draw(st.sampled_from([FULL / 2, FULL])) for server in range(servers)}
    simulated = SimulatedServers(sizes, speeds)
    for _ in range(4):
        balancer.step(simulated.figures(balancer.assignment.owner))
    expected = balancer.speeds()
    change = balancer.with_servers(range(servers + new))
    assert change is not None
    assert all(move.target >= servers for move in change.moves)
    after = balancer.speeds()
    assert {server: after[server] for server in expected} == expected
    # No more than what they should have, but for one slice each where slices are coarse.
    share = sum(after[server] for server in range(servers, servers + new)) / sum(after.values())
    moved = sum(move.size_bytes for move in change.moves)
    assert moved <= share * sum(sizes) + new * max(sizes)


@cases(300)
@given(
    sizes=size_lists,
    speeds=st.dictionaries(
        st.integers(0, 9), st.sampled_from([0.05, 0.2, 0.5, 1.0, 1.1]), min_size=1, max_size=8
    ),
    hidden=st.floats(0, 3),
    spare=st.integers(0, 4),
)
def test_hints_lead_somewhere(
    sizes: list[int], speeds: dict[int, float], hidden: float, spare: int
) -> None:
    """If hints are followed, each makes steps shorter or servers fewer, and they end."""
    hidden_s = hidden * sum(sizes) / sum(speeds.values())
    for _ in range(40):
        hint = scaling_hint(sizes, speeds, hidden_s, spare)
        if hint is None:
            break
        if hint.action == "scale_in":
            assert max(hint.after_s, hidden_s) < 1.05 * max(hint.before_s, hidden_s)
            spare += 1
        else:
            assert spare > 0
            assert hidden_s < hint.before_s
            assert hint.after_s < 0.95 * hint.before_s
            spare -= hint.action == "scale_out"
        fastest = max(speeds.values())
        if hint.server is not None:
            speeds = {server: v for server, v in speeds.items() if server != hint.server}
        if hint.action != "scale_in":
            speeds = {**speeds, max(speeds, default=0) + 1: fastest}
        assert speeds
    else:
        raise AssertionError("there is always something else")
