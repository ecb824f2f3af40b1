"""Moves slices from slow servers to fast ones while training runs.

When a server is late, or early, for a few steps in a row, a *correction* moves the fewest bytes
that should make all servers finish together (rebalance.py). At times, and less and less often, a
*probe* moves a slice without evidence: speeds depend on loads in ways that measurements of one
assignment do not show, and a server without slices gives no measurements. Both are on trial
(trial.py): if step times do not support the change, the slices go back, so that the best
assignment seen is in use.

Source:
    Chen, Peng, Bao, Wu, Zhu, Guo, "Elastic parameter server load distribution in deep learning
    clusters", SoCC 2020: profile, straggler detection, exploitation and exploration. Its text was
    not at hand; details, and all bounds on the cost of a probe, are ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hvd_order.base.errors import InvalidUsage
from hvd_order.servers.balance.assignment import Assignment
from hvd_order.servers.balance.exploration import STEPS, Exploration
from hvd_order.servers.balance.imbalance_detector import ImbalanceDetector, imbalance
from hvd_order.servers.balance.rebalance import (
    Move,
    longest_s,
    moves_between,
    rebalance,
    taken_over,
)
from hvd_order.servers.balance.speed_estimate import PATIENCE, SpeedEstimate, seconds_per_byte
from hvd_order.servers.balance.trial import RebalanceTrial, TrialVerdict

__all__ = ["Balancer", "Rebalance"]

_WARM_UP = 2  # steps after a change that the old assignment still affects
_SEEN = 16  # latest steps that a change is compared with
_ROUND = 0.25  # of all bytes may move at once
_WORTH = 0.97  # of the time before; a smaller gain is not worth a move
_STILL = 1.03  # times later than it should be, after a correction: continue


@dataclass(frozen=True)
class Rebalance:
    """A new assignment.

    Attributes:
        assignment: the new assignment.
        moves: moves from the previous assignment.
        why: ``correction``, ``probe``, ``roll_back`` or ``servers``.
    """

    assignment: Assignment
    moves: tuple[Move, ...]
    why: str


class Balancer:
    """Decides in one place, from all servers' measurements; pure, and deterministic for a seed.

    A change applies from the next step on. If steps are reported with the version that they ran
    under, it applies from the first step of its own version on.
    """

    def __init__(
        self,
        assignment: Assignment,
        sizes: Sequence[int],
        servers: Iterable[int],
        *,
        seed: int = 0,
        explore: bool = True,
    ) -> None:
        """Creates a balancer; it begins with the first step.

        Args:
            assignment: the assignment in use.
            sizes: bytes by slice.
            servers: live servers, the owners among them.
            seed: seed of the probes.
            explore: whether to make probes.

        Raises:
            InvalidUsage: a slice has no size or no live owner.
        """
        self._assignment = assignment
        self._sizes = tuple(sizes)
        self._estimates = {server: SpeedEstimate() for server in servers}
        if len(self._sizes) != len(assignment.owner):
            raise InvalidUsage(
                f"{len(assignment.owner)} slices have owners, {len(self._sizes)} have sizes"
            )
        if not set(assignment.owner) <= set(self._estimates):
            raise InvalidUsage(
                f"slices belong to servers {sorted(set(assignment.owner) - set(self._estimates))}, "
                "which are not among those that live; give the slices of gone servers away first"
            )
        self._loads = self._loads_now()
        self._detector = ImbalanceDetector()
        self._trial: RebalanceTrial | None = None
        self._look_again = False  # at a correction, after the warm-up
        self._warm_up_left = _WARM_UP
        self._seen_s: deque[float] = deque(maxlen=_SEEN)
        self._passes = 1.0  # bytes served in a step, relative to the bytes of all slices
        self._exploration = Exploration(seed)
        self._explore = explore

    @property
    def assignment(self) -> Assignment:
        """The newest assignment."""
        return self._assignment

    def speeds(self) -> dict[int, float]:
        """Returns bytes a second by server; the median for servers that have served nothing."""
        known = [
            estimate.mean for estimate in self._estimates.values() if estimate.mean is not None
        ]
        usual = median(known) if known else 1.0
        return {
            server: 1 / (usual if estimate.mean is None else estimate.mean)
            for server, estimate in self._estimates.items()
        }

    def step(
        self, figures: Mapping[int, tuple[int, float]], version: int | None = None
    ) -> Rebalance | None:
        """Processes a finished step.

        Args:
            figures: by server: bytes served in the step, and the seconds from the first push to
                the last answer. Servers that have left are ignored.
            version: version of the assignment that the step ran under; default: the newest. Steps
                of earlier versions are ignored.

        Returns:
            The change to make, if any.

        Raises:
            InvalidUsage: a figure is negative or not a number.
        """
        if version is not None and version != self._assignment.version:
            return None
        measured = seconds_per_byte(figures, self._estimates)
        served = sum(figures[server][0] for server in measured)
        self._passes = served / max(sum(self._sizes), 1) or self._passes
        times_s = {
            server: measured[server] * load
            for server, load in self._loads.items()
            if load and server in measured
        }
        step_s = max(times_s.values(), default=0.0)
        trial = self._trial
        self._exploration.step(step_s, step_s - trial.expected_s if trial and trial.probe else 0.0)
        if trial is not None and trial.too_slow(step_s):
            self._exploration.failed()
            return self._roll_back(trial)
        if self._warm_up_left:
            self._warm_up_left -= 1
            return None
        changed = [self._estimates[server].add(estimate) for server, estimate in measured.items()]
        if len(times_s) < sum(load > 0 for load in self._loads.values()) or not times_s:
            return None  # a server served nothing: the length of the step is unknown
        alarmed = self._detector.step(imbalance(times_s, self._loads), self._noise())
        self._seen_s.append(step_s)
        if trial is not None:
            trial.news |= any(changed)
            return self._on_trial(trial, step_s)
        if any(changed):
            self._exploration.found()
        if alarmed:
            correction = self._correct()
            if correction is None:
                self._detector.futile()
            return correction
        if self._look_again and len(self._seen_s) == _SEEN:  # speeds are known better by now
            self._look_again = False
            return self._go_on()
        return self._probe()

    def with_servers(self, servers: Collection[int]) -> Rebalance | None:
        """Adapts to servers that have joined or left.

        The slices of servers that left go to all remaining ones. New servers count as having
        median speed until measured, and get as few slices as make all servers finish together.

        Args:
            servers: live servers.

        Returns:
            The change to make; None if the servers are the same as before.

        Raises:
            InvalidUsage: there is no live server.
        """
        if not servers:
            raise InvalidUsage("a parameter server has to live for every slice; all are gone")
        if set(servers) == set(self._estimates):
            return None
        new = [server for server in servers if server not in self._estimates]
        self._estimates = {
            server: self._estimates.get(server) or SpeedEstimate() for server in servers
        }
        speeds = self.speeds()
        owner = taken_over(self._assignment.owner, self._sizes, speeds)
        if new:
            owner = rebalance(owner, self._sizes, speeds, receivers=new)
        self._detector = ImbalanceDetector()
        self._exploration.found()
        self._trial = None
        return self._change_to(owner, "servers")

    @property
    def is_steady(self) -> bool:
        """Whether no trial is in progress, and enough steps were seen since the last change."""
        return self._trial is None and len(self._seen_s) == _SEEN

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes by slice."""
        return self._sizes

    def step_speeds(self) -> dict[int, float]:
        """Returns bytes of a step that each server moves a second, over all passes of the step."""
        return {server: speed / self._passes for server, speed in self.speeds().items()}

    def _noise(self) -> float:
        return median(estimate.noise for estimate in self._estimates.values())

    def _loads_now(self) -> dict[int, int]:
        return {**dict.fromkeys(self._estimates, 0), **self._assignment.loads(self._sizes)}

    def _on_trial(self, trial: RebalanceTrial, step_s: float) -> Rebalance | None:
        verdict = trial.step(step_s)
        if verdict is None:
            return None
        self._trial = None
        if not trial.probe:
            if verdict is TrialVerdict.KEEP:
                return self._go_on()
            self._detector.futile()
            return self._roll_back(trial)
        if trial.news and (correction := self._correct()):
            return correction
        if verdict is TrialVerdict.KEEP:
            self._exploration.found()
            return None
        self._exploration.failed()
        return self._roll_back(trial)

    def _correct(self) -> Rebalance | None:
        """Returns the correction that measurements require, if it is worth its cost."""
        correction = self._rebalanced(self._noise())
        self._look_again = correction is not None
        return correction

    def _go_on(self) -> Rebalance | None:
        """Returns the next round of a correction, if one is necessary."""
        doubt = self._noise() / 4  # speeds are averages of some steps
        speeds = self.speeds()
        times_s = {server: load / speeds[server] for server, load in self._loads.items() if load}
        late = max(imbalance(times_s, self._loads).values())
        return self._rebalanced(doubt) if late > _STILL + doubt else None

    def _rebalanced(self, doubt: float) -> Rebalance | None:
        """Returns a correction, if its gain exceeds ``doubt``, below which it may be noise."""
        now, speeds = self._assignment.owner, self.speeds()
        in_the_end = rebalance(now, self._sizes, speeds)
        before_s, after_s = (longest_s(each, self._sizes, speeds) for each in (now, in_the_end))
        if after_s > (_WORTH - doubt) * before_s:
            return None
        owner = rebalance(now, self._sizes, speeds, most_bytes=_ROUND * sum(self._sizes))
        self._trial = RebalanceTrial(now, list(self._seen_s)[-PATIENCE:], PATIENCE, probe=False)
        return self._change_to(owner, "correction")

    def _probe(self) -> Rebalance | None:
        """Returns a probe, if one is due and its predicted cost is affordable."""
        ready = self._explore and len(self._seen_s) == _SEEN and self._detector.quiet
        if not ready or len(self._estimates) < 2 or not self._exploration.is_time():
            return None
        now, speeds = self._assignment.owner, self.speeds()
        owner = self._exploration.guess(now, self._sizes, speeds)
        now_s, then_s = (longest_s(each, self._sizes, speeds) for each in (now, owner))
        if not self._exploration.affordable(now_s, then_s):
            return None
        self._trial = RebalanceTrial(now, list(self._seen_s), STEPS, probe=True)
        return self._change_to(owner, "probe")

    def _roll_back(self, trial: RebalanceTrial) -> Rebalance:
        self._trial = None
        return self._change_to(trial.owner, "roll_back")

    def _change_to(self, owner: Sequence[int], why: str) -> Rebalance:
        moves = moves_between(self._assignment.owner, owner, self._sizes)
        self._assignment = self._assignment.changed_to(owner)
        self._loads = self._loads_now()
        self._warm_up_left = _WARM_UP
        self._seen_s.clear()
        self._detector.changed()
        for estimate in self._estimates.values():
            estimate.loosen()
        return Rebalance(self._assignment, moves, why)
