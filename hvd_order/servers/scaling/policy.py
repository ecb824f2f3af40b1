"""Scaling policy: decides when a job gets one server more or less by itself.

`hint.py` predicts which number is better. It needs the communication time that computation hides,
and no measurement of servers or connections shows it: a worker that waits for its first layer and
one that computes look the same to them. But the worker certainly computes while the connections
rest, so at least that much communication can be hidden::

    step     |<------------------------- step_s ------------------------->|
    lines    |======== busy_s: communication ========|....... rest .......|
    certain                                          |<--- hidden_s ----->|

This is the initial estimate, and experience corrects it, since each action is an experiment. If an
added server has made steps no shorter, communication of that length is hidden (or servers are not
what makes it long), and the server leaves again. If steps became longer with one server less, the
previous length of communication was all that could be hidden, and a server is added again. Either
result is remembered until steps have clearly changed, so a wrong guess is made once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

from hvd_order.servers.balance.balancer import Balancer
from hvd_order.servers.scaling.hint import MATTERS, Hint, hint_for

__all__ = ["ScalingDecision", "ScalingPolicy"]

_SEEN = 16  # latest steps that count
_PATIENCE = 8  # steps in a row with the same advice
_REST_STEPS = 50  # steps without action, at the start and after each action; and
_REST_S = 30.0
_MOST_CAUTION = 64  # times these, when actions keep failing
_SHARE = 0.25  # of the predicted gain must be observed
_OTHER = 1.5  # times longer or shorter: what was learnt no longer applies


@dataclass(frozen=True)
class ScalingDecision:
    """A decision of the policy.

    Attributes:
        hint: the action, and its expected effect.
        hidden_s: assumed hidden communication time of a step.
        undoes: the previous action was in vain, and this one reverts it.
    """

    hint: Hint
    hidden_s: float
    undoes: bool = False

    def __str__(self) -> str:
        """Returns a line for the log."""
        hint = self.hint
        what = {
            "scale_out": "one server more",
            "scale_in": f"without server {hint.server}",
            "replace": f"another server instead of {hint.server}",
        }[hint.action]
        why = ", since the action before was in vain" if self.undoes else ""
        return (
            f"{what}{why}: communication of {hint.before_s:.3g} s a step should become "
            f"{hint.after_s:.3g} s; {self.hidden_s:.3g} s are hidden"
        )


@dataclass
class _Experiment:
    """An action that was carried out, until its effect is clear.

    Attributes:
        decision: the action.
        step_s: step time before it.
        newcomer: the server that joined.
        servers: servers after it; None before the first step after it.
    """

    decision: ScalingDecision
    step_s: float
    newcomer: int | None = None
    servers: frozenset[int] | None = None


class ScalingPolicy:
    """Decides from step to step; pure."""

    def __init__(self, least: int, most: int) -> None:
        """Creates a policy; it begins with the first step.

        Args:
            least: smallest number of servers.
            most: largest number of servers.
        """
        self._least = least
        self._most = most
        self._seen: deque[tuple[float, float]] = deque(maxlen=_SEEN)  # seconds: step, lines busy
        self._caution = 1
        self._rest()
        self._acting: _Experiment | None = None
        self._experiment: _Experiment | None = None
        self._advice: tuple[str, int | None] | None = None
        self._times = 0  # in a row
        self._hidden_at_least_s = 0.0  # learnt
        self._hidden_at_most_s = math.inf
        self._learnt_at_s = 0.0  # step time when that was learnt

    @property
    def step_s(self) -> float:
        """Median time of the latest steps. There must be one."""
        return median(step_s for step_s, _ in self._seen)

    @property
    def hidden_s(self) -> float:
        """Best estimate of a step's communication time that computation hides."""
        rest_s = median(step_s - busy_s for step_s, busy_s in self._seen)
        return min(max(rest_s, self._hidden_at_least_s), self._hidden_at_most_s)

    def step(
        self, step_s: float, busy_s: float, balancer: Balancer, servers: Collection[int]
    ) -> ScalingDecision | None:
        """Processes a finished step.

        Args:
            step_s: seconds since the previous step.
            busy_s: seconds in which the busiest connection had data in flight.
            balancer: has already processed the same step.
            servers: current servers.

        Returns:
            The action to take; there is no other decision until `done` or `failed` reports its
            outcome.
        """
        if self._acting is not None:
            return None
        self._seen.append((step_s, min(busy_s, step_s)))
        self._left_steps -= 1
        self._left_s -= step_s
        if self._experiment is not None and self._experiment.servers is None:
            self._experiment.servers = frozenset(servers)
        rests = self._left_steps > 0 or self._left_s > 0
        if rests or not balancer.is_steady or len(self._seen) < _SEEN:
            return None
        self._forget_other_steps()
        return self._judge(servers) or self._look(balancer, servers)

    def done(self, newcomer: int | None) -> None:
        """Records that the decision was carried out.

        Args:
            newcomer: the server that joined, if the decision requested one.
        """
        assert self._acting is not None
        experiment, self._acting = self._acting, None
        self._seen.clear()
        self._rest()
        if not experiment.decision.undoes:
            experiment.newcomer = newcomer
            self._experiment = experiment

    def failed(self) -> None:
        """Records that the decision could not be carried out. The next one comes later."""
        self._acting = None
        self._seen.clear()
        self._in_vain()

    def _look(self, balancer: Balancer, servers: Collection[int]) -> ScalingDecision | None:
        """Returns a decision after the same advice for several steps."""
        hint = hint_for(balancer, self.hidden_s, self._most - len(servers))
        if hint is not None and hint.action == "scale_in" and len(servers) <= self._least:
            hint = None
        advice = None if hint is None else (hint.action, hint.server)
        self._times = self._times + 1 if advice == self._advice else 1
        self._advice = advice
        if hint is None or self._times < _PATIENCE:
            return None
        return self._decide(ScalingDecision(hint, self.hidden_s))

    def _decide(self, decision: ScalingDecision) -> ScalingDecision:
        self._acting = _Experiment(decision, self.step_s)
        self._advice, self._times = None, 0
        return decision

    def _judge(self, servers: Collection[int]) -> ScalingDecision | None:
        """Checks the effect of the last action; returns a decision that reverts it if it was in
        vain.
        """
        experiment, self._experiment = self._experiment, None
        if experiment is None or experiment.servers != frozenset(servers):
            return None  # other servers joined or left too: steps do not show its effect
        hint, hidden_s = experiment.decision.hint, experiment.decision.hidden_s
        if hint.action == "scale_in":
            if self.step_s <= (1 + MATTERS) * experiment.step_s:
                self._caution = 1
                return None
            self._learn(experiment.step_s, at_most_s=hint.before_s)
            undo = Hint("scale_out", None, hint.after_s, hint.before_s)
        else:
            gain_s = hint.before_s - max(hint.after_s, hidden_s)
            if experiment.step_s - self.step_s >= _SHARE * gain_s:
                self._caution = 1
                return None
            self._learn(experiment.step_s, at_least_s=hint.before_s)
            undo = Hint("scale_in", experiment.newcomer, hint.after_s, hint.before_s)
        self._in_vain()
        if hint.action == "replace":
            return None  # the number of servers is unchanged
        return self._decide(ScalingDecision(undo, self.hidden_s, undoes=True))

    def _learn(
        self, step_s: float, at_least_s: float | None = None, at_most_s: float | None = None
    ) -> None:
        """Records the latest finding, which overrides contradicting earlier ones.

        Args:
            step_s: step time with the servers that the job will have again.
            at_least_s: new lower bound of the hidden time.
            at_most_s: new upper bound of the hidden time.
        """
        self._learnt_at_s = step_s
        if at_least_s is not None:
            self._hidden_at_least_s = at_least_s
            self._hidden_at_most_s = max(self._hidden_at_most_s, at_least_s)
        if at_most_s is not None:
            self._hidden_at_most_s = at_most_s
            self._hidden_at_least_s = min(self._hidden_at_least_s, at_most_s)

    def _forget_other_steps(self) -> None:
        learnt_at_s = self._learnt_at_s
        if learnt_at_s and not 1 / _OTHER <= self.step_s / learnt_at_s <= _OTHER:
            self._hidden_at_least_s, self._hidden_at_most_s = 0.0, math.inf
            self._learnt_at_s = 0.0

    def _in_vain(self) -> None:
        self._caution = min(2 * self._caution, _MOST_CAUTION)
        self._rest()

    def _rest(self) -> None:
        self._left_steps = self._caution * _REST_STEPS
        self._left_s = self._caution * _REST_S
