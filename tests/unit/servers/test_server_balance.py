"""PSLD on simulated servers: what it gains, how soon, and that it leaves well alone."""

from __future__ import annotations

import random

import pytest
from helpers.oracles.simulated_servers import SimulatedServers, drive

from hvd_order.base.errors import InvalidUsage
from hvd_order.servers.balance.assignment import assign
from hvd_order.servers.balance.balancer import Balancer
from hvd_order.servers.balance.rebalance import moves_between, rebalance
from hvd_order.servers.scaling.hint import hint_for, scaling_hint

MIB = 2**20
FULL = 1e9  # bytes a second
QUARTER = FULL / 4


def a_job(
    servers: int = 4,
    sizes: list[int] | None = None,
    noise: float = 0.0,
    slow: dict[int, float] | None = None,
    seed: int = 0,
    shared: tuple[frozenset[int], ...] = (),
    slice_s: float = 0.0,
) -> tuple[Balancer, SimulatedServers, float]:
    """A balancer, its servers, and the step as long as slices are split evenly."""
    sizes = sizes or [2 * MIB] * 100
    first = assign(sizes, range(servers))
    simulated = SimulatedServers(
        sizes,
        {**dict.fromkeys(range(servers), FULL), **(slow or {})},
        slice_s,
        noise,
        shared,
        random.Random(seed),
    )
    balancer = Balancer(first, sizes, range(servers), seed=seed)
    return balancer, simulated, simulated.step_s(first.owner)


def mixed_sizes() -> list[int]:
    pick = random.Random(5)
    return [min(2 * MIB, int(pick.lognormvariate(13.5, 1.2)) + 1024) for _ in range(150)]


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("lag", [0, 2])
def test_one_of_four_at_a_quarter_of_the_speed(noise: float, lag: int) -> None:
    ideal = 0.8125 / 0.25
    for seed in range(10):
        balancer, servers, split_s = a_job(noise=noise, seed=seed, slow={2: QUARTER})
        run = drive(balancer, servers, 20, lag=lag)
        assert split_s / run.steps_s[-1] > 0.9 * ideal
        corrected = sum(m.size_bytes for change in run.of("correction") for m in change.moves)
        assert corrected < 0.25 * sum(servers.sizes)  # 0.173 of them have to move
        assert all(m.source == 2 for m in run.of("correction")[0].moves)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_slices_that_cost_more_than_their_bytes(noise: float) -> None:
    """Seconds per byte depend on which slices a server has: the first answer is a bit off."""
    for seed in range(10):
        balancer, servers, _ = a_job(
            noise=noise, seed=seed, sizes=mixed_sizes(), slow={2: QUARTER}, slice_s=MIB / 4
        )
        work = sum(servers.sizes) + len(servers.sizes) * servers.slice_s
        ideal_s = work / sum(servers.speeds.values())
        run = drive(balancer, servers, 40, lag=2)
        assert ideal_s / run.steps_s[20] > 0.8
        assert ideal_s / run.steps_s[-1] > 0.9


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_server_that_recovers_gets_its_share_back(noise: float) -> None:
    balancer, servers, split_s = a_job(noise=noise)
    run = drive(balancer, servers, 160, {50: {3: QUARTER}, 120: {3: FULL}}, lag=1)
    assert 4 * split_s / run.steps_s[70] > 0.9 * 3.25
    assert run.steps_s[145] < 1.1 * split_s
    loads = balancer.assignment.loads(servers.sizes)
    assert max(loads.values()) < 1.1 * min(loads.values())


def test_one_huge_slice_on_the_slow_server_leaves_it() -> None:
    sizes = [400 * MIB, *[2 * MIB] * 100]
    owner = assign(sizes, range(4)).owner[0]
    balancer, servers, split_s = a_job(sizes=sizes, slow={owner: QUARTER})
    run = drive(balancer, servers, 30)
    assert run.steps_s[-1] == pytest.approx(400 * MIB / FULL)  # nothing can be faster
    assert balancer.assignment.owner[0] != owner
    assert split_s / run.steps_s[-1] == pytest.approx(4)


def test_one_huge_slice_on_a_fast_server_stays() -> None:
    balancer, servers, _ = a_job(sizes=[400 * MIB, *[2 * MIB] * 100], noise=0.05)
    run = drive(balancer, servers, 3000)
    assert not run.of("correction")
    assert balancer.assignment.version <= 2 * len(run.of("probe"))


def test_a_pause_of_one_server_moves_nothing() -> None:
    pauses = {at: {1: FULL / 50} for at in range(40, 2000, 40)}
    over = {at + 2: {1: FULL} for at in pauses}
    balancer, servers, _ = a_job(noise=0.05)
    run = drive(balancer, servers, 2000, {**pauses, **over})
    assert not run.of("correction")


def test_without_exploration_there_are_no_probes() -> None:
    balancer, servers, _ = a_job(noise=0.05)
    quiet = Balancer(balancer.assignment, servers.sizes, range(4), explore=False)
    assert not drive(quiet, servers, 3000).changes


def test_a_server_with_nothing_left_is_found_when_it_recovers() -> None:
    balancer, servers, _ = a_job(sizes=[2 * MIB] * 16, slow={3: FULL / 50})
    run = drive(balancer, servers, 4000)
    assert 3 not in balancer.assignment.owner
    best_s = sum(sizes for sizes in [2 * MIB] * 6) / FULL
    assert sum(run.steps_s[50:]) < 1.02 * best_s * len(run.steps_s[50:])  # what probes cost
    servers.speeds[3] = FULL
    run = drive(balancer, servers, 8000)
    assert balancer.assignment.loads(servers.sizes)[3] == 4 * 2 * MIB
    assert run.of("probe")


def test_servers_behind_one_link() -> None:
    balancer, servers, split_s = a_job(
        slow={2: FULL / 2, 3: FULL / 2}, shared=(frozenset({2, 3}),), noise=0.05
    )
    run = drive(balancer, servers, 60)
    assert split_s / run.steps_s[-1] > 0.9 * 2.5  # together they are worth half a server


def test_a_correction_that_does_not_help_is_taken_back() -> None:
    """Whoever has fewer slices is slower: nothing that measurements suggest comes true."""
    sizes = [2 * MIB] * 40
    balancer = Balancer(assign(sizes, range(4)), sizes, range(4), explore=False)
    first = balancer.assignment.owner
    for _ in range(2000):
        loads = balancer.assignment.loads(sizes)
        moved = balancer.assignment.owner != first
        seconds = dict.fromkeys(range(4), 2.0 if moved else 1.0) | {0: 3.0 if moved else 1.5}
        balancer.step({p: (loads.get(p, 0), seconds[p]) for p in range(4)})
    assert balancer.assignment.owner == first
    assert balancer.assignment.version < 80  # and it is tried less and less often


def test_removing_a_server_moves_its_slices_alone() -> None:
    balancer, servers, _ = a_job(slow={3: QUARTER})
    drive(balancer, servers, 30)
    before = balancer.assignment
    change = balancer.with_servers({0, 1, 3})
    assert change is not None
    assert {move.slice for move in change.moves} == {
        i for i, owner in enumerate(before.owner) if owner == 2
    }
    assert change.assignment.version == before.version + 1
    # Those that are left get as much as their speeds allow.
    del servers.speeds[2]
    assert servers.step_s(change.assignment.owner) < 1.05 * sum(servers.sizes) / (2.25 * FULL)


def test_steps_of_old_versions_and_gone_servers_are_not_looked_at() -> None:
    balancer, servers, _ = a_job(slow={2: QUARTER})
    late = servers.figures(balancer.assignment.owner)
    change = balancer.with_servers([0, 1, 2])
    assert change is not None
    for _ in range(50):
        assert balancer.step(late, version=0) is None
    current = change.assignment
    del servers.speeds[3]
    now = servers.figures(current.owner)
    answers = [balancer.step({**now, 3: (5, 7.0)}, version=1) for _ in range(8)]
    assert [answer.why for answer in answers if answer] == ["correction"]


def test_the_same_seed_makes_the_same_choices() -> None:
    runs = [
        [change for _, change in drive(balancer, servers, 3000).changes]
        for balancer, servers, _ in (a_job(noise=0.05, seed=4) for _ in range(2))
    ]
    assert runs[0] == runs[1]
    assert runs[0]


def test_mistakes_are_named() -> None:
    first = assign([4] * 6, range(3))
    with pytest.raises(InvalidUsage, match="6 slices have owners, 5 have sizes"):
        Balancer(first, [4] * 5, range(3))
    with pytest.raises(InvalidUsage, match=r"servers \[2\]"):
        Balancer(first, [4] * 6, range(2))
    balancer = Balancer(first, [4] * 6, range(3))
    with pytest.raises(InvalidUsage, match="server 1 cannot serve"):
        balancer.step({1: (8, float("nan"))})
    with pytest.raises(InvalidUsage, match="all are gone"):
        balancer.with_servers([])


def test_levelling_moves_no_byte_that_need_not() -> None:
    sizes = [4, 3, 2, 1] * 10
    owner = [i // 4 % 2 for i in range(40)]
    after = rebalance(owner, sizes, {0: 3.0, 1: 1.0})
    moves = moves_between(owner, after, sizes)
    assert sum(move.size_bytes for move in moves) == 25  # 50 and 50 become 75 and 25
    assert all(move.source == 1 for move in moves)


def test_hints_about_the_number_of_servers() -> None:
    sizes = [MIB] * 100
    step_s = 25 * MIB / FULL
    four = dict.fromkeys(range(4), FULL)
    assert scaling_hint(sizes, four, hidden_s=step_s, spare=1) is None
    more = scaling_hint(sizes, four, hidden_s=0.5 * step_s, spare=1)
    assert more is not None
    assert (more.action, more.server) == ("scale_out", None)
    assert more.after_s == pytest.approx(0.8 * more.before_s)
    assert scaling_hint(sizes, four, hidden_s=0.5 * step_s, spare=0) is None
    # Two would do.
    fewer = scaling_hint(sizes, four, hidden_s=2 * step_s, spare=1)
    assert fewer is not None
    assert fewer.action == "scale_in"
    # A straggler: another one instead if there is one; else it may stay, if it is worth anything.
    one_slow = {**four, 2: QUARTER}
    other = scaling_hint(sizes, one_slow, hidden_s=0, spare=1)
    assert other is not None
    assert (other.action, other.server) == ("replace", 2)
    assert scaling_hint(sizes, one_slow, hidden_s=0, spare=0) is None
    dropped = scaling_hint(sizes, {**four, 2: FULL / 10}, hidden_s=0, spare=0)
    assert dropped is not None
    assert (dropped.action, dropped.server) == ("scale_in", 2)
    # More servers do not help where one slice is all that takes time.
    alone = scaling_hint([100 * MIB, MIB], {0: FULL, 1: FULL}, hidden_s=0, spare=3)
    assert alone is not None
    assert alone.action == "scale_in"


def test_the_balancer_hints_when_it_knows() -> None:
    balancer, servers, split_s = a_job()
    assert hint_for(balancer, hidden_s=0.0, spare=1) is None
    drive(balancer, servers, 20)
    hint = hint_for(balancer, hidden_s=0.0, spare=1)
    assert hint is not None
    assert hint.action == "scale_out"
    assert hint.before_s == pytest.approx(split_s)
    # Bytes may be counted of one worker or of all.
    double = Balancer(balancer.assignment, servers.sizes, range(4))
    for _ in range(20):
        figures = servers.figures(balancer.assignment.owner)
        double.step({p: (2 * served, seconds) for p, (served, seconds) in figures.items()})
    again = hint_for(double, hidden_s=0.0, spare=1)
    assert again is not None
    assert again.before_s == pytest.approx(split_s)
