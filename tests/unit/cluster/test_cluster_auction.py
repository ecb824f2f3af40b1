"""PD-ORS and OASiS: prices, one slot, schedules, and the optimum that knows all jobs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from helpers.oracles.offline_optimum import offline_optimum
from helpers.oracles.small_cluster import compare_with_optimum, speed

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.model.placement import MachinePart
from hvd_order.cluster.model.speed import LocalitySpeed
from hvd_order.cluster.model.utility import Constant, Steps
from hvd_order.cluster.policies.interface import JobState, View
from hvd_order.cluster.policies.oasis import Oasis
from hvd_order.cluster.policies.pd_ors import PdOrs
from hvd_order.cluster.pricing.one_slot import Demand, OneSlot, _solve, round_randomly
from hvd_order.cluster.pricing.prices import Prices, limits_for
from hvd_order.cluster.simulate.outcome import JobOutcome
from hvd_order.cluster.simulate.simulator import Rules, simulate

TWO = Machines.alike(2, {"gpu": 4})


def job(name: str, quanta: int, inside: float, outside: float, worth: list[float]) -> ClusterJob:
    return ClusterJob(
        name, 0.0, quanta, speed(inside, outside), {"gpu": 1}, {"gpu": 1}, workers_per_server=2,
        requested=2, most=8, batch=8, utility=Steps(worth),
    )  # fmt: skip


A = job("A", 5, 0.5, 0.6, [20, 12, 4])
B = job("B", 6, 0.5, 1.0, [20, 17, 14])
C = job("C", 4, 0.5, 1.0, [9, 2.8, 2.5])


class OwnQuanta(PdOrs):
    """Each job's work in as many parts as it has samples, as the vector has it."""

    def quanta_of(self, job: ClusterJob) -> int:
        return int(job.samples)


def sold_in_order(jobs: list[ClusterJob]) -> tuple[PdOrs, float, dict[str, float]]:
    """The policy after the jobs, their utility, and the payoff of each."""
    policy = OwnQuanta(TWO, 3, Prices(1.0, np.array([16.0])), 1, "exact")
    waiting: dict[str, JobState] = {}
    for number, one in enumerate(jobs):
        state = JobState(one, number, TWO.amounts(one.worker), TWO.amounts(one.server))
        waiting[one.name] = state
        decision = policy.decide(View(0.0, TWO, TWO.capacity, waiting, {}, (state,), 1.0))
        for name in decision.reject:
            del waiting[name]
    sold = policy.accepted
    payoffs = {one.name: sold[one.name].payoff if one.name in sold else 0.0 for one in jobs}
    return (
        policy,
        sum(one.utility(sold[one.name].last) for one in jobs if one.name in sold),
        payoffs,
    )


def test_prices_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="the lower first"):
        Prices(2.0, np.array([1.0]))


def test_limits_of_oasis_machines() -> None:
    """One kind of job, two machines for workers and one for servers, computed by hand."""
    one = ClusterJob(
        "one", 0.0, 8, LocalitySpeed(0.5, 0.0, 1.0, 1.0), {"unit": 2}, {"unit": 1},
        workers_per_server=1, requested=4, most=4, batch=4,
        utility=Steps([19.0 - k for k in range(19)]),
    )  # fmt: skip
    workers = limits_for([one], Machines.alike(2, {"unit": 8}), 1.0, 10, 0.25, servers=False)
    servers = limits_for([one], Machines.alike(1, {"unit": 8}), 1.0, 10, 0.25, workers=False)
    assert (workers.low, workers.high[0]) == pytest.approx((0.015625, 9.5))
    assert (servers.low, servers.high[0]) == pytest.approx((0.03125, 19.0))
    used = np.array([[0.0], [2.0], [4.0], [8.0]])
    assert workers.of(used, np.full((4, 1), 8.0)).ravel() == pytest.approx(
        [0.015625, 0.077588, 0.385276, 9.5], rel=1e-5
    )
    assert workers.ratio == pytest.approx(12.82, abs=0.01)


def test_three_jobs_two_machines_three_slots() -> None:
    policy, utility, payoffs = sold_in_order([A, B, C])
    assert utility == 37
    assert payoffs == pytest.approx({"A": 15.0, "B": 10.0, "C": 0.0})
    a, b = policy.accepted["A"], policy.accepted["B"]
    assert [each.parts for each in a.placements.values()] == [
        (MachinePart(0, 3, 1), MachinePart(1, 0, 1))
    ]
    assert (b.cost, b.last) == (7.0, 1)
    assert b.placements[0].parts == (MachinePart(1, 1, 1),)
    assert b.placements[1].parts == (MachinePart(0, 2, 1),)
    assert policy.used[:, :, 0].tolist() == [[4, 3], [3, 0], [0, 0]]


@pytest.mark.parametrize(
    ("order", "worth"),
    [("ABC", 37), ("ACB", 43), ("BAC", 37), ("BCA", 38), ("CAB", 43), ("CBA", 38)],
)
def test_order_of_arrival_decides(order: str, worth: float) -> None:
    jobs = {"A": A, "B": B, "C": C}
    policy, utility, payoffs = sold_in_order([jobs[name] for name in order])
    assert utility == worth
    prices = np.stack([policy.prices(used) for used in policy.used])
    dual = sum(payoffs.values()) + float((prices * TWO.capacity).sum())
    assert dual >= 43
    if order == "ABC":
        assert dual == pytest.approx(165)


def test_offline_optimum_of_the_three_jobs() -> None:
    assert offline_optimum([A, B, C], TWO, 3, [5, 6, 4]) == pytest.approx(43)


def test_relaxation_and_integers_differ() -> None:
    """Three workers, half a server each: 4.5 units at prices of 1 and 2 cost 5, five cost 6."""
    demand = Demand(np.array([1.0]), np.array([1.0]), 2)
    random = np.random.default_rng(0)
    prices, free = np.array([[1.0], [2.0]]), np.full((2, 1), 4.0)
    relaxed = _solve(OneSlot(demand, prices, free, "exact", random), 3, integers=False)
    assert relaxed is not None
    assert float(relaxed @ [1, 2, 1, 2]) == pytest.approx(5.0)
    for solver in ("exact", "rounding", "greedy"):
        cost, placement = OneSlot(demand, prices, free, solver, random).apart(3)  # type: ignore[arg-type]
        assert cost == pytest.approx(6.0)
        assert placement is not None
        assert (placement.workers, placement.servers) == (3, 2)


def test_rounding_keeps_the_mean_and_integers() -> None:
    rounded = round_randomly(np.array([0.25, 3.0]), 4000, np.random.default_rng(1))
    assert set(rounded[:, 0].tolist()) == {0, 1}
    assert rounded[:, 0].mean() == pytest.approx(0.25, abs=0.03)
    assert set(rounded[:, 1].tolist()) == {3}


def run(
    policy: PdOrs | Oasis, jobs: list[ClusterJob], machines: Machines, rules: Rules
) -> list[JobOutcome]:
    found: list[JobOutcome] = []
    simulate(jobs, machines, policy, rules, ended=found.append)
    return found


def test_oasis_keeps_servers_on_machines_of_their_own() -> None:
    prices = Prices(1.0, np.array([16.0]))
    policy = Oasis(TWO, 3, prices, prices, server_machines=1, quanta=6)
    [outcome] = run(policy, [B], TWO, Rules(slot_s=1.0, until_s=3.0, keep_placements=True))
    assert outcome.ended_s is not None
    for each in outcome.placements:
        assert all(workers == 0 if machine == 1 else servers == 0
                   for machine, workers, servers in each.parts)  # fmt: skip


def test_accepted_job_is_finished_although_resizing_takes_time() -> None:
    """A schedule does not count on the time in which a job stands still."""
    policy = PdOrs(TWO, 8, Prices(0.01, np.array([16.0])), 6)
    rules = Rules(slot_s=1.0, until_s=8.0, start_s=0.25, resize_s=0.25)
    free = job("free", 6, 0.5, 1.0, [20, 17, 14, 13, 12, 11, 10, 9])
    [outcome] = run(policy, [free], TWO, rules)
    assert outcome.ended_s is not None
    assert outcome.utility > 0


def test_without_slots_the_policy_says_what_to_do() -> None:
    with pytest.raises(InvalidUsage, match="slot"):
        run(PdOrs(TWO, 3, Prices(1.0, np.array([16.0])), 6), [A], TWO, Rules())


@pytest.mark.timeout(300)
def test_random_instances_against_the_optimum() -> None:
    for seed in range(25):
        compare_with_optimum(seed)


def test_greedy_and_rounding_are_never_below_exact() -> None:
    random = np.random.default_rng(3)
    worse = []
    for _ in itertools.repeat(None, 60):
        machines = int(random.integers(2, 7))
        free = np.stack([random.integers(0, 6, machines), random.integers(0, 12, machines)], axis=1)
        prices = random.uniform(0.1, 4, (machines, 2))
        demand = Demand(np.array([1.0, float(random.integers(1, 4))]),
                        np.array([0.0, float(random.integers(1, 3))]),
                        int(random.integers(1, 5)))  # fmt: skip
        workers = int(random.integers(1, 8))
        costs = {
            solver: OneSlot(demand, prices, free.astype(float), solver, random).apart(workers)[0]  # type: ignore[arg-type]
            for solver in ("exact", "rounding", "greedy")
        }
        assert costs["exact"] <= costs["rounding"] * (1 + 1e-9) or math.isinf(costs["rounding"])
        assert costs["rounding"] <= costs["greedy"] * (1 + 1e-9)
        if math.isfinite(costs["exact"]):
            worse.append(costs["rounding"] / costs["exact"])
    assert np.mean(worse) < 1.05


def test_a_job_worth_nothing_is_refused() -> None:
    worthless = ClusterJob("w", 0.0, 4, speed(0.5, 1.0), {"gpu": 1}, requested=1, most=4, batch=4,
                    utility=Constant(0.0))  # fmt: skip
    [outcome] = run(
        PdOrs(TWO, 3, Prices(1.0, np.array([16.0])), 4), [worthless], TWO, Rules(1.0, 3.0)
    )
    assert outcome.rejected
