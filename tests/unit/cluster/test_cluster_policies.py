"""Who runs when, in cases that are small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machine, Machines
from hvd_order.cluster.model.placement import JobPlacement, MachinePart
from hvd_order.cluster.model.speed import Speed, TableSpeed
from hvd_order.cluster.policies.dorm import Dorm
from hvd_order.cluster.policies.drf import Drf
from hvd_order.cluster.policies.finish_time import FinishTime
from hvd_order.cluster.policies.interface import ClusterPolicy, JobState, PolicyDecision, View
from hvd_order.cluster.policies.ones import Ones
from hvd_order.cluster.policies.ones.policy import batch_for
from hvd_order.cluster.policies.ones.score import Lengths, remaining_worker_s
from hvd_order.cluster.policies.ones.search import Problem, Search
from hvd_order.cluster.policies.optimus import Optimus, spread
from hvd_order.cluster.policies.packing import pack
from hvd_order.cluster.policies.registry import POLICIES, PolicyInputs, policy
from hvd_order.cluster.policies.srtf import Srtf
from hvd_order.cluster.policies.tiresias import Tiresias
from hvd_order.cluster.simulate.outcome import JobOutcome
from hvd_order.cluster.simulate.simulator import Rules, simulate
from hvd_order.planning.predict.workers.closed_forms import OptimusAsync

LINEAR = TableSpeed({1: 1.0, 64: 64.0})  # a sample a second and worker


def job(
    name: str, arrival_s: float, samples: float, requested: int = 1, most: int | None = None,
    speed: Speed = LINEAR, worker: Mapping[str, float] = {"gpu": 1}, **more: object,
) -> ClusterJob:  # fmt: skip
    return ClusterJob(
        name, arrival_s, samples, speed, worker,
        requested=requested, most=most or requested, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def gpus(*counts: int) -> Machines:
    return Machines([Machine(f"m{i}", {"gpu": count}) for i, count in enumerate(counts)])


def run(
    jobs: list[ClusterJob], machines: Machines, made: ClusterPolicy, resize_s: float = 0.0,
    slot_s: float | None = None,
) -> dict[str, JobOutcome]:  # fmt: skip
    outcomes: dict[str, JobOutcome] = {}
    rules = Rules(slot_s, resize_s=resize_s, keep_placements=True)
    simulate(jobs, machines, made, rules, ended=lambda o: outcomes.__setitem__(o.name, o))
    return outcomes


def ends(*args: object, **more: object) -> dict[str, float]:
    found = run(*args, **more)  # type: ignore[arg-type]
    return {name: pytest.approx(outcome.ended_s) for name, outcome in found.items()}


class Recorder:
    def __init__(self, made: ClusterPolicy) -> None:
        self.made = made
        self.decisions: list[PolicyDecision] = []

    def decide(self, view: View) -> PolicyDecision:
        self.decisions.append(self.made.decide(view))
        return self.decisions[-1]


def counts(
    jobs: list[ClusterJob], machines: Machines, made: ClusterPolicy, until_s: float
) -> dict[str, int]:
    """Workers of all jobs after the decisions up to a moment."""
    recorder = Recorder(made)
    simulate(jobs, machines, recorder, Rules(until_s=until_s))
    found: dict[str, int] = {}
    for decision in recorder.decisions:
        for name, placement in decision.place.items():
            found[name] = placement.workers if placement else 0
    return found


def state_of(made: ClusterJob, machines: Machines, number: int = 0) -> JobState:
    return JobState(made, number, machines.amounts(made.worker), machines.amounts(made.server))


# -------------------------------------------------------------------- shortest remaining time first


@pytest.mark.parametrize(
    ("resize_s", "expected"),
    [
        (80, {"short": 15, "long": 15 + 80 + 95}),  # 10 + 80 < 95 seconds that the long one has
        (90, {"long": 100, "short": 110}),
    ],
)
def test_srtf_stops_nobody_if_it_costs_more_than_it_gains(
    resize_s: float, expected: dict[str, float]
) -> None:
    jobs = [job("long", 0, 100), job("short", 5, 10)]
    assert ends(jobs, gpus(1), Srtf(), resize_s=resize_s) == expected


def test_srtf_stops_only_those_that_it_must() -> None:
    jobs = [job("a", 0, 200, 2), job("c", 0, 600, 2), job("b", 5, 20, 2)]
    found = run(jobs, gpus(4), Srtf())
    assert [found[name].changes for name in "abc"] == [0, 0, 1]
    assert [found[name].ended_s for name in "abc"] == pytest.approx([100, 15, 310])


def test_srtf_works_at_the_starts_of_slots() -> None:
    jobs = [job("long", 0, 100), job("short", 5, 10)]
    # Seen at 20, at its end the long one is still where it was; it goes on at 40.
    assert ends(jobs, gpus(1), Srtf(), slot_s=20) == {"short": 30, "long": 120}


# ---------------------------------------------------------------------- dominant resource fairness
def test_drf_gives_what_the_example_of_the_paper_says() -> None:
    machines = Machines([Machine("m", {"cpu": 9, "gb": 18})])
    jobs = [
        job("a", 0, 100, most=10, worker={"cpu": 1, "gb": 4}),
        job("b", 0, 100, most=10, worker={"cpu": 3, "gb": 1}),
    ]
    assert counts(jobs, machines, Drf(), 1) == {"a": 3, "b": 2}


def test_drf_counts_the_servers_that_workers_need() -> None:
    machines = Machines([Machine("m", {"gpu": 4, "cpu": 3})])
    more = {"server": {"cpu": 1.0}, "workers_per_server": 2}
    jobs = [job(name, 0, 100, most=4, **more) for name in "ab"]
    recorder = Recorder(Drf())
    simulate(jobs, machines, recorder, Rules(until_s=1))
    # A third worker of one would need a second server, and leave the other one below half.
    assert recorder.decisions[0].place == {
        name: JobPlacement((MachinePart(0, 2, 1),)) for name in "ab"
    }


def test_drf_takes_from_a_job_for_a_new_one_and_gives_back_at_its_end() -> None:
    jobs = [job("a", 0, 100, most=4), job("b", 10, 100, most=4)]
    # a: 40 samples by 10, then 2 a second until 40. b: 60 by 40, then 4 a second.
    assert ends(jobs, gpus(4), Drf()) == {"a": 40, "b": 50}


def test_drf_lets_a_job_grow_only_if_it_ends_sooner() -> None:
    jobs = [job("a", 0, 100, most=4), job("b", 10, 100, most=4)]
    found = run(jobs, gpus(4), Drf(), resize_s=30)
    # a stands still from 10 to 40 and ends at 70. b would grow at no moment: a runs until then.
    assert {name: o.ended_s for name, o in found.items()} == pytest.approx({"b": 60, "a": 70})
    assert (found["a"].changes, found["b"].changes) == (1, 0)


# -------------------------------------------------------------------------------------------- dorm
def test_dorm_uses_everything_and_shares_fairly() -> None:
    jobs = [job("a", 0, 1000, most=8), job("b", 10, 1000, most=8)]
    assert counts(jobs[:1], gpus(8), Dorm(), 1) == {"a": 8}
    # 5 and 3 would be 1/8 too much and 1/8 too little: more than a fifth of the shares.
    assert counts(jobs, gpus(8), Dorm(), 11) == {"a": 4, "b": 4}


def test_dorm_changes_few_running_jobs_at_a_time() -> None:
    jobs = [job("a", 0, 1000, most=8), job("b", 0, 1000, most=8), job("c", 10, 1000, most=8)]
    found = counts(jobs, gpus(8), Dorm(adjustments=0.2), 11)
    assert sorted(found[name] == 4 for name in "ab") == [False, True]
    assert found["c"] > 0
    assert sum(found.values()) == 8
    assert counts(jobs, gpus(8), Dorm(adjustments=1.0), 11) == {"a": 3, "b": 3, "c": 2}


def test_dorm_refuses_bounds_outside_of_0_to_1() -> None:
    with pytest.raises(InvalidUsage, match=r"fairness loss of 1\.5"):
        Dorm(fairness_loss=1.5)


# ----------------------------------------------------------------------------------------- optimus
def test_optimus_gives_workers_where_they_save_most_time() -> None:
    jobs = [job("short", 0, 10, most=3), job("long", 0, 100, most=3)]
    assert counts(jobs, gpus(3), Optimus(), 1) == {"short": 1, "long": 2}


@dataclass(frozen=True)
class OptimusSpeed:
    """Asynchronous workers by Optimus' formula; ``batch``: samples a step of one worker."""

    formula: OptimusAsync
    batch: int

    def samples_per_s(self, workers: int, servers: int, machines: int, batch: int) -> float:
        """Speed of all workers together."""
        return self.batch * self.formula.steps_per_s(workers, max(servers, 1))


def test_optimus_gives_a_server_if_that_saves_more_than_a_worker() -> None:
    machines = Machines([Machine("m", {"slot": 4})])
    # 2 workers: 2/9 steps/s with one server, 2/5 with two. 3 workers and a server: 3/13.
    speed = OptimusSpeed(OptimusAsync(1, 4, 0, 0), batch=1)
    made = job("a", 0, 100, most=4, speed=speed, worker={"slot": 1},
               server={"slot": 1}, workers_per_server=10)  # fmt: skip
    recorder = Recorder(Optimus())
    simulate([made], machines, recorder, Rules(until_s=1))
    assert recorder.decisions[0].place == {"a": JobPlacement((MachinePart(0, 2, 2),))}


def test_optimus_spreads_evenly_over_the_fewest_machines() -> None:
    machines = Machines.alike(3, {"gpu": 4, "cpu": 4})
    made = job("a", 0, 1, 6, worker={"gpu": 1, "cpu": 1}, server={"cpu": 1}, workers_per_server=3)
    placed = spread(state_of(made, machines), 6, machines.capacity)
    assert placed == JobPlacement((MachinePart(0, 3, 1), MachinePart(1, 3, 1)))


# ---------------------------------------------------------------------------------------- tiresias
def test_tiresias_stops_a_job_that_has_had_its_service_for_one_that_waits() -> None:
    jobs = [job("a", 0, 100), job("b", 10, 30)]
    assert ends(jobs, gpus(1), Tiresias(threshold_s=50)) == {"b": 80, "a": 130}
    assert ends(jobs, gpus(1), Tiresias()) == {"a": 100, "b": 130}  # 16 hours are far


def test_tiresias_counts_accelerators_not_workers() -> None:
    jobs = [job("a", 0, 100, worker={"gpu": 2}), job("b", 10, 20, worker={"gpu": 2})]
    assert ends(jobs, gpus(2), Tiresias(threshold_s=50)) == {"b": 45, "a": 120}


def test_tiresias_keeps_the_order_of_arrival_in_the_second_queue() -> None:
    jobs = [job("a", 0, 100), job("b", 10, 100)]
    # a until 50, b until 100; then both are in the second queue, and a is older.
    assert ends(jobs, gpus(1), Tiresias(threshold_s=50)) == {"a": 150, "b": 200}


# ---------------------------------------------------------------------------- finish-time fairness
def test_finish_time_gives_the_next_round_to_the_job_that_fares_worst() -> None:
    jobs = [job("a", 0, 100), job("b", 0, 10)]
    # At 10: a 100 / 200, b 20 / 20 of the time with half of the machine.
    assert ends(jobs, gpus(1), FinishTime(round_s=10)) == {"b": 20, "a": 110}


def test_finish_time_stops_nobody_within_a_round() -> None:
    jobs = [job("a", 0, 100), job("c", 5, 1)]
    assert ends(jobs, gpus(1), FinishTime(round_s=10)) == {"c": 11, "a": 101}


def test_finish_time_has_rounds_of_ten_resizes_at_least() -> None:
    jobs = [job("a", 0, 100), job("c", 5, 1)]
    assert ends(jobs, gpus(1), FinishTime(round_s=10), resize_s=5) == {"c": 51, "a": 106}


# -------------------------------------------------------------------------------------------- ones
def test_ones_score_of_two_jobs() -> None:
    # y n (1/rho - 1) / x: 20 and 30.
    parts = remaining_worker_s([10_000, 4_000], [2, 1], [0.5, 0.25], [1000, 400])
    assert parts.sum() == pytest.approx(50)


def test_ones_batch_grows_with_the_workers_up_to_the_largest() -> None:
    made = job("a", 0, 100, 2, 8, batch=8, most_batch=20)
    assert [batch_for(made, n) for n in (1, 2, 4, 8)] == [4, 8, 16, 20]


def test_ones_doubles_a_limit_after_two_epochs_at_it() -> None:
    made = job("a", 0, 100, 1, 4, epoch_samples=10)
    # 20 samples with one worker, 20 with two, the rest with four.
    assert ends([made], gpus(4), Ones()) == {"a": 20 + 10 + 15}


def test_ones_counts_the_worth_of_samples_of_a_large_batch() -> None:
    made = job("a", 0, 100, 1, 4, epoch_samples=10, batch=8, most_batch=16, noise_scale=8.0)
    # From two workers on the batch is 16, whose samples are worth (8 + 8) / (8 + 16).
    assert ends([made], gpus(4), Ones()) == {"a": 20 + 15 + 22.5}


def test_ones_changes_running_jobs_after_their_epoch_only() -> None:
    jobs = [job("a", 0, 200, 2, epoch_samples=20), job("b", 1, 10)]
    found = run(jobs, gpus(2), Ones())
    # a does its epoch until 10, shrinks for b, and needs two more epochs, until 50, to grow again.
    assert found["b"].started_s == pytest.approx(10)
    assert {name: o.ended_s for name, o in found.items()} == pytest.approx({"b": 20, "a": 120})


def test_ones_fills_free_places_at_once() -> None:
    jobs = [job("a", 0, 200, 2, epoch_samples=200), job("b", 1, 10, 2)]
    assert ends(jobs, gpus(4), Ones())["b"] == 6


def test_ones_search_prefers_the_job_with_less_left() -> None:
    machines = gpus(1)
    states = [state_of(job(name, 0, 100), machines, i) for i, name in enumerate("ab")]
    states[0].placement = JobPlacement((MachinePart(0, 1),))
    problem = Problem(
        states, np.array([1, 1]), np.array([1, 1]), np.array([[0.0, 1.0]] * 2),
        np.array([30.0, 30.0]), np.array([False, False]), np.array([True, True]),
        5.0, np.zeros((1, 1)), np.array([1]),
    )  # fmt: skip
    search = Search(problem, np.random.default_rng(0))
    found = search.run([], [np.array([0.1, 0.9])] * 3)
    assert found[0].counts.tolist() == [0, 1]
    found = search.run([], [np.array([0.9, 0.1])] * 3)
    assert found[0].counts.tolist() == [1, 0]


def test_ones_learns_from_the_jobs_that_ended_how_long_jobs_take() -> None:
    lengths = Lengths()
    assert lengths.to_come(job("x", 0, 100), 3) == 1
    lengths.ended(job("a", 0, 100, epoch_samples=10, model="m"))
    lengths.ended(job("b", 0, 100, epoch_samples=5, model="n"))
    assert lengths.to_come(job("c", 0, 100, model="m"), 4) == 1 + 6
    assert lengths.to_come(job("d", 0, 100, model="other"), 4) == 1 + 11
    assert lengths.to_come(job("e", 0, 100, model="m"), 40) == 1


# -------------------------------------------------------------------------------------- all of them
NAMES = ["srtf", "drf", "dorm", "optimus", "tiresias", "finish-time", "ones"]


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_no_machines_hold_is_rejected_and_the_others_run(name: str) -> None:
    jobs = [job("huge", 0, 10, 5, least=5), job("small", 0, 10)]
    known = PolicyInputs(gpus(2), None, 1e9, jobs)
    found = run(jobs, gpus(2), policy(name, known))
    assert found["huge"].rejected
    assert found["small"].ended_s is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_asks_for_too_much_runs_with_what_there_is(name: str) -> None:
    made = job("a", 0, 10, 5, least=1)
    found = run([made], gpus(2), policy(name, PolicyInputs(gpus(2), None, 1e9, [made])))
    assert found["a"].ended_s == pytest.approx(5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slot_s", [None, 10.0])
def test_a_job_that_needs_no_resources_runs(name: str, slot_s: float | None) -> None:
    made = [job("a", 0, 10, worker={}), job("b", 0, 10)]
    found = run(
        made, gpus(1), POLICIES[name](PolicyInputs(gpus(1), slot_s, 1e9, made)), slot_s=slot_s
    )
    assert all(outcome.ended_s is not None for outcome in found.values())


def test_pack_puts_servers_first_where_workers_would_take_their_place() -> None:
    machines = Machines([Machine("m0", {"slot": 3}), Machine("m1", {"slot": 2})])
    made = job("a", 0, 1, worker={"slot": 1}, server={"slot": 3}, workers_per_server=1)
    placed = pack(state_of(made, machines), 1, machines.capacity)
    assert placed == JobPlacement((MachinePart(0, 0, 1), MachinePart(1, 1, 0)))
