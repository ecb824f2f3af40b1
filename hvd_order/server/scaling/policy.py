"""When a job gets a server more or less by itself.

`scaling.py` says what is better by prediction. It needs to know how much communication computation
hides, and nothing that servers or lines measure tells that: a worker that waits for its first layer
and one that computes look the same to them. What is certain is that the worker computes while the
lines rest, so that much communication at least would find room::

    step     |<------------------------- step_s ------------------------->|
    lines    |======== busy_s: communication ========|....... rest .......|
    certain                                          |<--- hidden_s ----->|

That is the estimate to begin with, and experience corrects it, since each action is an experiment.
If a server more has made steps no shorter, communication of that length does not show (or it is not
the servers that make it long), and the server goes again. If steps became longer with one less,
communication of the length before was all that could hide, and a server comes again. Either is
remembered until steps have clearly changed, so a wrong guess is made once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

from hvd_order.server.balance.balancer import Balancer
from hvd_order.server.scaling.hint import MATTERS, Hint, hint_for

__all__ = ["Decision", "ScalingPolicy"]

_SEEN = 16  # latest steps that count
_PATIENCE = 8  # steps in a row that advise the same
_REST_STEPS = 50  # without action, to begin with and after each; and
_REST_S = 30.0
_MOST_CAUTION = 64  # times these, when actions keep being in vain
_SHARE = 0.25  # of the predicted gain has to be seen
_OTHER = 1.5  # times longer or shorter: these are other steps than those that were learnt from


@dataclass(frozen=True)
class Decision:
    """What is to be done.

    Attributes:
        hint: the action, and what it should bring.
        hidden_s: communication of a step that is taken to be hidden.
        undoes: the action before was in vain, and this takes it back.
    """

    hint: Hint
    hidden_s: float
    undoes: bool = False

    def __str__(self) -> str:
        """A line for the log."""
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
    """An action that has been carried out, until it is clear what it brought.

    Attributes:
        step_s: before it.
        newcomer: the server that came.
        servers: that there were at its end; None before the first step after it.
    """

    decision: Decision
    step_s: float
    newcomer: int | None = None
    servers: frozenset[int] | None = None


class ScalingPolicy:
    """Decides from step to step; pure."""

    def __init__(self, least: int, most: int) -> None:
        """Begins with the first step.

        Args:
            least: servers that stay in any case.
            most: servers at a time.
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
        self._learnt_at_s = 0.0  # a step took

    @property
    def step_s(self) -> float:
        """What a step takes: the median of the latest. There has to be one."""
        return median(step_s for step_s, _ in self._seen)

    @property
    def hidden_s(self) -> float:
        """Communication of a step that computation hides, as far as is known."""
        rest_s = median(step_s - busy_s for step_s, busy_s in self._seen)
        return min(max(rest_s, self._hidden_at_least_s), self._hidden_at_most_s)

    def step(
        self, step_s: float, busy_s: float, balancer: Balancer, servers: Collection[int]
    ) -> Decision | None:
        """A step has ended.

        Args:
            step_s: since the one before.
            busy_s: in which the line that was busy longest had something under way.
            balancer: has been told of the same step.
            servers: that there are.

        Returns:
            What to do; until `done` or `failed` tells how it went, nothing else is decided.
        """
        if self._acting is not None:
            return None
        self._seen.append((step_s, min(busy_s, step_s)))
        self._left_steps -= 1
        self._left_s -= step_s
        if self._experiment is not None and self._experiment.servers is None:
            self._experiment.servers = frozenset(servers)
        rests = self._left_steps > 0 or self._left_s > 0
        if rests or not balancer.settled or len(self._seen) < _SEEN:
            return None
        self._forget_other_steps()
        return self._judge(servers) or self._look(balancer, servers)

    def done(self, newcomer: int | None) -> None:
        """The decision has been carried out.

        Args:
            newcomer: the server that came, if one was to.
        """
        assert self._acting is not None
        experiment, self._acting = self._acting, None
        self._seen.clear()
        self._rest()
        if not experiment.decision.undoes:
            experiment.newcomer = newcomer
            self._experiment = experiment

    def failed(self) -> None:
        """The decision could not be carried out. The next comes later than usual."""
        self._acting = None
        self._seen.clear()
        self._in_vain()

    def _look(self, balancer: Balancer, servers: Collection[int]) -> Decision | None:
        """What is advised, once it has been for a while."""
        hint = hint_for(balancer, self.hidden_s, self._most - len(servers))
        if hint is not None and hint.action == "scale_in" and len(servers) <= self._least:
            hint = None
        advice = None if hint is None else (hint.action, hint.server)
        self._times = self._times + 1 if advice == self._advice else 1
        self._advice = advice
        if hint is None or self._times < _PATIENCE:
            return None
        return self._decide(Decision(hint, self.hidden_s))

    def _decide(self, decision: Decision) -> Decision:
        self._acting = _Experiment(decision, self.step_s)
        self._advice, self._times = None, 0
        return decision

    def _judge(self, servers: Collection[int]) -> Decision | None:
        """Whether steps have become what they should. If not: what takes it back."""
        experiment, self._experiment = self._experiment, None
        if experiment is None or experiment.servers != frozenset(servers):
            return None  # others have come or gone as well: steps say nothing about it
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
            return None  # there are as many as before
        return self._decide(Decision(undo, self.hidden_s, undoes=True))

    def _learn(
        self, step_s: float, at_least_s: float | None = None, at_most_s: float | None = None
    ) -> None:
        """What was found last holds, also against what was found before.

        Args:
            step_s: with the servers that there will be again.
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
