"""The simulator of a cluster, by hand: who runs when, what it costs, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob, check_job
from hvd_order.cluster.model.machines import Machine, Machines
from hvd_order.cluster.model.placement import JobPlacement, MachinePart
from hvd_order.cluster.model.speed import LocalitySpeed, TableSpeed
from hvd_order.cluster.model.utility import Constant, Sigmoid, Steps
from hvd_order.cluster.policies.fifo import Fifo
from hvd_order.cluster.policies.interface import JobState, PolicyDecision, View
from hvd_order.cluster.policies.packing import pack
from hvd_order.cluster.policies.registry import PolicyInputs, policy
from hvd_order.cluster.simulate.outcome import JobOutcome, PlacementInterval, Summary
from hvd_order.cluster.simulate.simulator import Rules, simulate

ONE = Machines.alike(1, {"gpu": 4})


def job(
    name: str, arrival_s: float = 0.0, seconds: float = 10.0, workers: int = 1, **more: object
) -> ClusterJob:
    """A job that takes so long with its workers, and less with more of them."""
    speed = TableSpeed({1: 1.0, 8: 8.0})
    return ClusterJob(name, arrival_s, seconds * workers, speed, {"gpu": 1}, requested=workers,
                      most=8, **more)  # type: ignore[arg-type]  # fmt: skip


class Scripted:
    """Does at each time what it is told."""

    def __init__(self, script: Mapping[float, PolicyDecision]) -> None:
        self._script = dict(script)

    def decide(self, view: View) -> PolicyDecision:
        decision = self._script.pop(view.now_s, PolicyDecision())
        decision.wake_s = min(self._script, default=None)
        return decision


def on(workers: int, machine: int = 0) -> JobPlacement:
    return JobPlacement((MachinePart(machine, workers),))


def run(
    jobs: Iterable[ClusterJob],
    policy: object,
    rules: Rules | None = None,
    machines: Machines = ONE,
    rates: Callable[[Mapping[str, JobState]], Mapping[str, float]] | None = None,
) -> tuple[dict[str, JobOutcome], Summary]:
    found: dict[str, JobOutcome] = {}

    def ended(outcome: JobOutcome) -> None:
        found[outcome.name] = outcome

    return found, simulate(jobs, machines, policy, rules, rates=rates, ended=ended)  # type: ignore[arg-type]


def test_fifo_by_hand() -> None:
    """The second job waits for the first, and the third, which would fit, for the second."""
    jobs = [job("a", 0, 10, 3), job("b", 1, 5, 2), job("c", 2, 1, 1)]
    found, summary = run(jobs, Fifo(), Rules(keep_placements=True))
    assert [found[n].ended_s for n in "abc"] == pytest.approx([10, 15, 11])
    assert found["b"].wait_s == 9
    assert found["a"].placements == (PlacementInterval(0.0, 10.0, ((0, 3, 0),)),)
    figures = summary.metrics()
    assert figures["completion_mean_s"] == pytest.approx((10 + 14 + 9) / 3)
    assert figures["makespan_s"] == 15
    assert figures["utilisation_gpu"] == pytest.approx((3 * 10 + 2 * 5 + 1) / (4 * 15))
    assert figures["utility"] == 3


def test_a_resize_keeps_progress_and_costs_its_time() -> None:
    """5 s with 1 worker, 2 s of standstill, the other 15 samples with 3 workers."""
    script = {0.0: PolicyDecision({"a": on(1)}), 5.0: PolicyDecision({"a": on(3)})}
    found, _ = run([job("a", 0, 20)], Scripted(script), Rules(resize_s=2.0))
    assert found["a"].ended_s == pytest.approx(5 + 2 + 5)
    assert (found["a"].changes, found["a"].worker_s) == (1, pytest.approx(5 + 3 * 7))


def test_a_stopped_job_goes_on_where_it_stopped() -> None:
    script = {
        0.0: PolicyDecision({"a": on(1)}),
        4.0: PolicyDecision({"a": None}),
        9.0: PolicyDecision({"a": on(1)}),
    }
    found, _ = run([job("a", 0, 10)], Scripted(script), Rules(start_s=1.0, resize_s=2.0))
    assert found["a"].ended_s == pytest.approx(9 + 2 + (10 - 3))
    assert found["a"].started_s == 0


def test_swapping_two_jobs_needs_no_room_for_both() -> None:
    script = {
        0.0: PolicyDecision({"a": on(4)}),
        1.0: PolicyDecision({"b": on(4), "a": None}),
        2.0: PolicyDecision({"a": on(4), "b": None}),
        3.0: PolicyDecision({"b": on(4), "a": None}),
        4.0: PolicyDecision({"a": on(4)}),
    }
    found, _ = run([job("a", 0, 3, 4), job("b", 0, 2, 4)], Scripted(script))
    assert (found["a"].ended_s, found["b"].ended_s) == (pytest.approx(5), pytest.approx(4))


def test_slots_begin_on_the_grid_and_utilities_count_them() -> None:
    """What arrives within a slot starts with the next one."""
    late = job("late", 12, 10, utility=Steps([5.0, 3.0], slot_s=10.0))
    longer = job("longer", 20, 15, utility=Steps([5.0, 3.0], slot_s=10.0))
    found, _ = run([late, longer], Fifo(), Rules(slot_s=10.0))
    assert (found["late"].started_s, found["late"].ended_s) == (20, 30)
    assert found["late"].utility == 5
    assert (found["longer"].ended_s, found["longer"].utility) == (35, 3)


def test_the_end_of_the_run_leaves_jobs_worth_nothing() -> None:
    found, summary = run([job("a", 0, 10), job("b", 50, 10)], Fifo(), Rules(until_s=8.0))
    assert found["a"].ended_s is None
    assert found["a"].worker_s == 8
    assert (summary.jobs, summary.completed, summary.utility) == (1, 0, 0)


def test_shared_links_slow_jobs_down() -> None:
    """Two jobs at half speed, until the first ends."""

    def shared(running: Mapping[str, JobState]) -> Mapping[str, float]:
        return {name: 1.0 / len(running) for name in running}

    found, _ = run([job("a", 0, 2), job("b", 0, 6)], Fifo(), rates=shared)
    assert (found["a"].ended_s, found["b"].ended_s) == (pytest.approx(4), pytest.approx(8))
    # The second one slows the first down when it comes: 2 s alone, then 4 s together.
    found, _ = run([job("a", 0, 4), job("b", 2, 3)], Fifo(), rates=shared)
    assert (found["a"].ended_s, found["b"].ended_s) == (pytest.approx(6), pytest.approx(7))


def test_finish_time_fairness_is_one_where_nobody_waits() -> None:
    found, _ = run([job("a", 0, 10, 4)], Fifo())
    assert found["a"].fairness == pytest.approx(1)
    found, _ = run([job("a", 0, 10, 4), job("b", 0, 10, 4)], Fifo())
    assert found["a"].fairness == pytest.approx(0.5)  # twice as much was asked for as there is
    assert found["b"].fairness == pytest.approx(20 / (10 * 1.5))


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ({0.0: PolicyDecision({"a": on(5)})}, "more of 'gpu' than machine 'm0'"),
        ({0.0: PolicyDecision({"x": on(1)})}, "'x', which is not in the cluster"),
        ({0.0: PolicyDecision()}, "lets job 'a' wait"),
        (
            {0.0: PolicyDecision({"a": on(1)}), 1.0: PolicyDecision(reject=["a"])},
            "which does not wait",
        ),
    ],
)
def test_impossible_decisions_are_named(script: Mapping[float, PolicyDecision], text: str) -> None:
    with pytest.raises(InvalidUsage, match=text):
        run([job("a")], Scripted(script))


def test_a_policy_that_asks_for_the_past_is_refused() -> None:
    class Now(Fifo):
        def decide(self, view: View) -> PolicyDecision:
            decision = super().decide(view)
            decision.wake_s = view.now_s
            return decision

    with pytest.raises(InvalidUsage, match="expected a later time"):
        run([job("a")], Now())


@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        ([job("a", 5), job("b", 1)], "'b' arrives before 'a'"),
        ([job("a", 0), job("a", 1)], "two jobs are called 'a'"),
    ],
)
def test_bad_lists_of_jobs_are_refused(jobs: list[ClusterJob], text: str) -> None:
    with pytest.raises(InvalidUsage, match=text):
        run(jobs, Fifo())


@pytest.mark.parametrize(
    ("demand", "text"),
    [
        ({"gpu": 9}, "all machines together hold 0"),
        ({"tpu": 1}, "the machines have gpu"),
    ],
)
def test_a_job_that_no_machine_can_hold(demand: dict[str, float], text: str) -> None:
    one = ClusterJob("big", 0.0, 1.0, TableSpeed({1: 1.0}), demand)
    with pytest.raises(InvalidUsage, match=text):
        check_job(one, ONE)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"samples": 0.0}, "0.0 samples"),
        ({"arrival_s": -1.0}, "arrives at -1.0 s"),
        ({"samples": math.nan}, "nan samples"),
        ({"requested": 9, "most": 8}, "9 workers of 1 to 8"),
        ({"worker": {"gpu": -1}}, "a worker takes"),
        ({"workers_per_server": 0}, "0 workers a server"),
    ],
)
def test_jobs_with_impossible_numbers(change: dict[str, object], text: str) -> None:
    arguments = {"name": "j", "arrival_s": 0.0, "samples": 1.0, "speed": TableSpeed({1: 1.0}),
                 "worker": {"gpu": 1}, **change}  # fmt: skip
    with pytest.raises(InvalidUsage, match=text):
        ClusterJob(**arguments)  # type: ignore[arg-type]


def test_machines_with_impossible_numbers() -> None:
    with pytest.raises(InvalidUsage, match="two machines are called 'm'"):
        Machines([Machine("m", {"gpu": 1}), Machine("m", {"gpu": 1})])
    with pytest.raises(InvalidUsage, match="without machines"):
        Machines([])
    with pytest.raises(InvalidUsage, match="-1 of 'gpu'"):
        Machines([Machine("m", {"gpu": -1})])


def test_packing_prefers_the_fullest_machine_that_holds_all() -> None:
    machines = Machines.alike(3, {"gpu": 4})
    state = JobState(job("a", workers=2), 0, np.array([1.0]), np.array([0.0]))
    free = np.array([[4.0], [2.0], [3.0]])
    assert pack(state, 2, free) == on(2, 1)
    assert pack(state, 5, free) == JobPlacement((MachinePart(0, 4), MachinePart(2, 1)))
    assert pack(state, 10, free) is None
    assert len(machines) == 3


def test_packing_finds_room_for_servers() -> None:
    one = ClusterJob("a", 0.0, 1.0, TableSpeed({1: 1.0}), {"gpu": 1}, {"gpu": 1}, 2, 4, 1, 8)
    state = JobState(one, 0, np.array([1.0]), np.array([1.0]))
    placement = pack(state, 4, np.array([[4.0], [2.0]]))
    assert placement == JobPlacement((MachinePart(0, 4, 0), MachinePart(1, 0, 2)))
    assert pack(state, 4, np.array([[4.0], [1.0]])) is None


def test_speeds() -> None:
    locality = LocalitySpeed(0.5, 1.0, 10.0, 2.0)
    assert locality.samples_per_s(3, 1, 1, 8) == pytest.approx(3 / 0.6)
    assert locality.samples_per_s(3, 1, 2, 8) == pytest.approx(3 / 1.0)
    table = TableSpeed({1: 10.0, 4: 28.0}, {4: 16.0})
    assert table.samples_per_s(2, 0, 1, 1) == pytest.approx(16)
    assert table.samples_per_s(9, 0, 1, 1) == 28
    assert table.samples_per_s(2, 0, 2, 1) == 8


def test_utilities() -> None:
    assert Sigmoid(10, 2.0, 3.0)(3.0) == 5
    assert Sigmoid(10, 2.0, 3.0)(1e9) == pytest.approx(0)
    assert Constant(4.0)(1e9) == 4
    assert [Steps([3, 1])(t) for t in (0.0, 0.99, 1.0, 2.0)] == [3, 3, 1, 0]


def test_a_large_batch_is_worth_less_than_its_samples() -> None:
    one = job("a", batch=128, most_batch=512, noise_scale=256.0)
    assert one.samples_per_s(JobPlacement((MachinePart(0, 2),), batch=512)) == pytest.approx(
        2 * 384 / 768
    )


def test_unknown_policies_and_runs_without_slots() -> None:
    known = PolicyInputs(ONE, None, math.inf, [job("a")])
    with pytest.raises(InvalidUsage, match=r"there are: .*fifo"):
        policy("best", known)
    with pytest.raises(InvalidUsage, match="slot length"):
        policy("pd-ors", known)
