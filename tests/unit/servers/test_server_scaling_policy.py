"""When servers come and go by themselves, in jobs of known computation and communication."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from helpers.oracles.simulated_servers import SimulatedServers

from hvd_order.servers.balance.assignment import assign
from hvd_order.servers.balance.balancer import Balancer
from hvd_order.servers.scaling.policy import ScalingDecision, ScalingPolicy

MIB = 2**20
FULL = 20.0 * MIB  # bytes a second


@dataclass
class Job:
    """Steps of ``compute_s`` that hide ``hidden_s`` of communication.

    Attributes:
        line: bytes a second that all servers share; more servers are no faster than that.
        refuse: decisions that cannot be carried out.
        decisions: with the step after which they were made.
    """

    count: int
    compute_s: float
    hidden_s: float
    least: int = 1
    most: int = 8
    slices: int = 80
    line: float = float("inf")
    noise: float = 0.02
    refuse: Callable[[ScalingDecision], bool] = lambda _decision: False
    step: int = 0
    decisions: list[tuple[int, ScalingDecision]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = [MIB] * self.slices
        self.speeds = dict.fromkeys(range(self.count), FULL)
        self.balancer = Balancer(assign(self.sizes, range(self.count)), self.sizes, self.speeds)
        self.policy = ScalingPolicy(self.least, self.most)
        self.random = random.Random(1)

    def communication_s(self) -> float:
        return max(self.simulated().times_s(self.balancer.assignment.owner).values())

    def step_s(self) -> float:
        return self.compute_s + max(0.0, self.communication_s() - self.hidden_s)

    def simulated(self) -> SimulatedServers:
        share = self.line / len(self.speeds)
        speeds = {server: min(speed, share) for server, speed in self.speeds.items()}
        return SimulatedServers(self.sizes, speeds)

    def draw(self) -> float:
        return max(0.2, self.random.gauss(1, self.noise))

    def run(self, steps: int) -> list[str]:
        """Returns what was decided meanwhile."""
        before = len(self.decisions)
        for _ in range(steps):
            self.take_step()
        return [decision.hint.action for _, decision in self.decisions[before:]]

    def take_step(self) -> None:
        figures = self.simulated().figures(self.balancer.assignment.owner)
        figures = {
            server: (served, seconds * self.draw()) for server, (served, seconds) in figures.items()
        }
        step_s = self.step_s() * self.draw()
        busy_s = max(seconds for _, seconds in figures.values())
        self.balancer.step(figures)
        self.step += 1
        decision = self.policy.step(step_s, busy_s, self.balancer, self.speeds)
        if decision is None:
            return
        self.decisions.append((self.step, decision))
        if self.refuse(decision):
            self.policy.failed()
        else:
            self.carry_out(decision)

    def carry_out(self, decision: ScalingDecision) -> None:
        newcomer = None
        if decision.hint.action != "scale_in":
            newcomer = max(self.speeds) + 1
            self.speeds[newcomer] = FULL
        if decision.hint.server is not None:
            del self.speeds[decision.hint.server]
        assert self.least <= len(self.speeds) <= self.most
        self.balancer.with_servers(self.speeds)
        self.policy.done(newcomer)


def test_servers_come_while_communication_shows() -> None:
    job = Job(2, compute_s=0.5, hidden_s=0.3, most=4)
    before_s = job.step_s()
    assert job.run(600) == ["scale_out"] * 2
    assert len(job.speeds) == 4
    assert job.step_s() < 0.65 * before_s
    for _, decision in job.decisions:
        assert decision.hint.after_s < decision.hint.before_s
        assert "one server more: communication of " in str(decision)
    (first, _), (second, _) = job.decisions
    assert first > 50
    assert second - first > 50, "it has to be seen what the first one brings"


def test_no_server_comes_where_communication_has_room() -> None:
    job = Job(2, compute_s=5.0, hidden_s=3.0, least=2)
    assert job.run(600) == []


def test_a_server_that_brings_nothing_goes_again_and_none_comes_for_it() -> None:
    """Lines are busy most of the step, and yet nobody waits for them: only trying tells."""
    job = Job(2, compute_s=2.5, hidden_s=2.5, least=2)
    assert job.communication_s() == pytest.approx(2.0)
    assert job.run(1000) == ["scale_out", "scale_in"]
    assert set(job.speeds) == {0, 1}, "the newcomer goes, not one that has proven itself"
    assert job.decisions[1][1].undoes
    assert "in vain" in str(job.decisions[1][1])
    # The network gets slow: communication shows after all.
    job.speeds = dict.fromkeys(job.speeds, FULL / 4)
    assert "scale_out" in job.run(600)


def test_servers_behind_one_slow_line_do_not_become_more() -> None:
    job = Job(2, compute_s=0.1, hidden_s=0.0, line=FULL)
    assert job.run(1000) == ["scale_out", "scale_in"]


def test_servers_that_nobody_would_miss_go() -> None:
    job = Job(4, compute_s=9.0, hidden_s=8.0)
    assert job.run(600) == ["scale_in"] * 3
    assert len(job.speeds) == 1
    keeps = Job(4, compute_s=9.0, hidden_s=8.0, least=2)
    assert keeps.run(600) == ["scale_in"] * 2


def test_a_server_that_is_missed_comes_again_and_stays() -> None:
    """Lines rest for long, but all communication shows, since the first layer is needed at once."""
    job = Job(2, compute_s=6.0, hidden_s=0.0, most=2)
    before_s = job.step_s()
    assert job.run(1000) == ["scale_in", "scale_out"]
    assert job.step_s() < 1.05 * before_s
    assert job.decisions[1][1].undoes


def test_another_server_comes_for_a_straggler() -> None:
    job = Job(4, compute_s=0.1, hidden_s=0.0, least=4, most=5)
    job.speeds[2] = FULL / 8
    assert job.run(200)[:1] == ["replace"]
    assert job.decisions[0][1].hint.server == 2
    assert 2 not in job.speeds


def test_nothing_is_done_before_advice_has_lasted() -> None:
    job = Job(2, compute_s=0.5, hidden_s=0.3)
    assert job.run(50) == []
    job = Job(3, compute_s=9.0, hidden_s=8.0, least=3, noise=0.3)
    assert job.run(600) == [], "noise is no reason"


def test_what_fails_is_tried_less_and_less_often() -> None:
    job = Job(2, compute_s=0.5, hidden_s=0.3, refuse=lambda _decision: True)
    job.run(1500)
    steps = [step for step, _ in job.decisions]
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert 3 <= len(steps) <= 6
    assert all(1.8 * a < b for a, b in itertools.pairwise(gaps)), gaps


def test_what_others_did_meanwhile_is_not_blamed_on_an_action() -> None:
    job = Job(2, compute_s=2.5, hidden_s=2.5, least=2, most=3)
    while not job.decisions:
        job.take_step()
    job.take_step()
    job.speeds[7] = FULL  # somebody starts another one by hand
    job.balancer.with_servers(job.speeds)
    job.run(300)
    assert not any(decision.undoes for _, decision in job.decisions[:2])
