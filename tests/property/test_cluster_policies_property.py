"""What holds for every policy on any small cluster: the simulator accepts its decisions, every job
that fits ends with its work done, and the same seed gives the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.property_cases import Choices, cases, choices
from hypothesis import given

from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machine, Machines
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.model.speed import TableSpeed
from hvd_order.cluster.policies.dorm import Dorm
from hvd_order.cluster.policies.drf import Drf
from hvd_order.cluster.policies.finish_time import FinishTime
from hvd_order.cluster.policies.interface import ClusterPolicy, PolicyDecision, View
from hvd_order.cluster.policies.ones import Ones
from hvd_order.cluster.policies.ones.policy import batch_for
from hvd_order.cluster.policies.optimus import Optimus
from hvd_order.cluster.policies.srtf import Srtf
from hvd_order.cluster.policies.tiresias import Tiresias
from hvd_order.cluster.simulate.outcome import JobOutcome
from hvd_order.cluster.simulate.simulator import Rules, simulate

# Short queues and rounds, so that jobs of minutes change places.
POLICIES: dict[str, Callable[[], ClusterPolicy]] = {
    "srtf": Srtf,
    "drf": Drf,
    "dorm": Dorm,
    "optimus": Optimus,
    "tiresias": lambda: Tiresias(threshold_s=60.0),
    "finish-time": lambda: FinishTime(round_s=15.0),
    "ones": lambda: Ones(seed=3),
}


@dataclass
class Case:
    jobs: list[ClusterJob]
    machines: Machines
    rules: Rules


def draw(pick: Choices) -> Case:
    """Up to three unequal machines, up to nine jobs of whole resources; ties are common."""
    machines = Machines(
        [
            Machine(f"m{i}", {"gpu": pick.one_of([2, 4, 4]), "cpu": pick.one_of([4, 8])})
            for i in range(1 + pick.below(3))
        ]
    )
    most_on_one = int((machines.capacity / np.array([1.0, 2.0])).min(axis=1).max())
    with_servers = pick.below(2) == 1
    jobs, arrival_s = [], 0.0
    for i in range(1 + pick.below(9)):
        arrival_s += pick.one_of([0.0, 0.0, 7.0, 40.0])
        requested = 1 + pick.below(max(most_on_one - 1, 1))
        least = 1 + pick.below(min(requested, 2))
        most = requested + pick.below(5)
        together = {n: 10.0 * n / (1 + 0.05 * (n - 1)) for n in range(1, most + 1)}
        apart = {n: rate * pick.one_of([0.5, 0.9]) for n, rate in together.items()}
        servers = with_servers and pick.below(3) > 0
        jobs.append(
            ClusterJob(
                f"j{i}",
                arrival_s,
                float(pick.one_of([50, 400, 1500, 3000])),
                TableSpeed(together, apart),
                {"gpu": 1, "cpu": pick.one_of([0, 1])},
                {"cpu": 1} if servers else {},
                pick.one_of([1, 2, 4]) if servers else None,
                requested,
                least,
                most,
                batch=8 * requested,
                most_batch=16 * requested,
                noise_scale=pick.one_of([None, 100.0]),
                epoch_samples=pick.one_of([50.0, 300.0, math.inf]),
                model=pick.one_of(["", "a", "b"]),
            )
        )
    slot_s = pick.one_of([None, None, 10.0, 60.0])
    return Case(
        jobs, machines, Rules(slot_s, resize_s=pick.one_of([0.0, 5.0, 25.0]), keep_placements=True)
    )


class Watched:
    """Checks what a policy may not do, which the simulator would accept."""

    def __init__(self, inner: ClusterPolicy) -> None:
        self.inner = inner
        self.done: dict[str, float] = {}

    def decide(self, view: View) -> PolicyDecision:
        states = {**view.running, **view.waiting}
        for name, state in states.items():
            done = state.done(view.now_s)
            assert done >= self.done.get(name, 0.0) - 1e-6, "a job lost progress"
            self.done[name] = done
        before = view.free.copy()
        decision = self.inner.decide(view)
        assert (view.free == before).all(), "the policy changed its view"
        for name, placement in decision.place.items():
            state = states[name]
            assert placement != state.placement, "it names a job that does not change"
            if placement is not None:
                job = state.job
                assert job.least <= placement.workers <= job.most
                assert placement.servers >= job.servers_for(placement.workers)
                assert placement.batch is None or placement.batch <= (job.most_batch or job.batch)
        return decision


def run(name: str, case: Case) -> list[JobOutcome]:
    outcomes: list[JobOutcome] = []
    simulate(case.jobs, case.machines, Watched(POLICIES[name]()), case.rules, ended=outcomes.append)
    return outcomes


def fits(case: Case, job: ClusterJob) -> bool:
    """All of the fewest workers and servers on one machine: such a job can run, whatever packs."""
    servers = job.servers_for(job.least)
    whole = job.least * case.machines.amounts(job.worker)
    whole = whole + servers * case.machines.amounts(job.server)
    return bool((case.machines.capacity >= whole).all(axis=1).any())


@pytest.mark.parametrize("name", POLICIES)
@given(pick=choices())
@cases(30)
def test_every_job_that_fits_ends_and_has_trained_all_its_samples(name: str, pick: Choices) -> None:
    case = draw(pick)
    outcomes = {outcome.name: outcome for outcome in run(name, case)}
    assert set(outcomes) == {job.name for job in case.jobs}
    for job in case.jobs:
        outcome = outcomes[job.name]
        if outcome.rejected:
            assert not fits(case, job)
            continue
        assert outcome.ended_s is not None
        trained = 0.0
        for index, part in enumerate(outcome.placements):
            workers = sum(workers for _, workers, _ in part.parts)
            batch = batch_for(job, workers) if name == "ones" else None
            rate = job.samples_per_s(JobPlacement.of(part.parts, batch))
            still_s = case.rules.resize_s if index else 0.0
            trained += rate * max(part.end_s - part.begin_s - still_s, 0.0)
        assert trained == pytest.approx(job.samples)


@pytest.mark.parametrize("name", POLICIES)
@given(pick=choices())
@cases(6)
def test_the_same_seed_gives_the_same_run(name: str, pick: Choices) -> None:
    case = draw(pick)
    assert run(name, case) == run(name, case)
