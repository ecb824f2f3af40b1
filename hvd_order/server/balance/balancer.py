"""Moves slices from slow servers to fast ones while training runs.

A few steps that all say that a server is late, or early, lead to a *correction*: the fewest bytes
that should make all finish together (levelling.py). Now and then, and less and less often, a
*probe* moves a slice on no evidence, because speeds depend on loads in ways that measurements of
one assignment do not show, and a server that serves nothing shows nothing. Either is on trial
(trial.py): if steps do not agree, the slices go back, so that the best assignment seen is in use.

Source:
    Chen, Peng, Bao, Wu, Zhu, Guo, "Elastic parameter server load distribution in deep learning
    clusters", SoCC 2020: profile, straggler detection, exploitation and exploration. Its text was
    not at hand; details, and all that bounds what a probe may cost, are ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hvd_order.errors import InvalidUsage
from hvd_order.server.balance.assignment import Assignment
from hvd_order.server.balance.exploration import STEPS, Exploration
from hvd_order.server.balance.imbalance_detector import ImbalanceDetector, imbalance
from hvd_order.server.balance.rebalance import Move, longest_s, moves_between, rebalance, taken_over
from hvd_order.server.balance.speed_estimate import PATIENCE, SpeedEstimate, seconds_per_byte
from hvd_order.server.balance.trial import Trial, Verdict

__all__ = ["Balancer", "Change"]

_WARM_UP = 2  # steps after a change that still feel what was before
_SEEN = 16  # latest steps that a change is held against
_ROUND = 0.25  # of all bytes may move at once
_WORTH = 0.97  # of the time before; less is not worth a move
_STILL = 1.03  # times later than it should, after a correction: go on


@dataclass(frozen=True)
class Change:
    """A new assignment.

    Attributes:
        moves: what leads to it from the one before.
        why: ``correction``, ``probe``, ``roll_back`` or ``servers``.
    """

    assignment: Assignment
    moves: tuple[Move, ...]
    why: str


class Balancer:
    """Decides in one place, from all servers' measurements; pure, and the same for the same seed.

    A change is in force from the next step on, or, if steps are reported with the version that they
    ran under, from the first step of its own version on.
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
        """Begins with the first step.

        Args:
            assignment: in use.
            sizes: bytes by slice.
            servers: that live, the owners among them.
            seed: of the probes.
            explore: whether there are probes.

        Raises:
            InvalidUsage: a slice has no size or no living owner.
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
        self._trial: Trial | None = None
        self._look_again = False  # at a correction, when it has settled
        self._settling = _WARM_UP
        self._seen_s: deque[float] = deque(maxlen=_SEEN)
        self._passes = 1.0  # bytes served in a step, in relation to those of all slices
        self._exploration = Exploration(seed)
        self._explore = explore

    @property
    def assignment(self) -> Assignment:
        """The newest."""
        return self._assignment

    def speeds(self) -> dict[int, float]:
        """Bytes a second by server; the median for those that have served nothing yet."""
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
    ) -> Change | None:
        """A step has ended.

        Args:
            figures: by server: bytes served in the step, and the seconds from the first push to the
                last answer. Servers that are gone are not looked at.
            version: of the assignment that the step ran under; not given: the newest. Steps of
                earlier ones are not looked at.

        Returns:
            What to change, if anything.

        Raises:
            InvalidUsage: a figure is negative or no number.
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
        if self._settling:
            self._settling -= 1
            return None
        changed = [self._estimates[server].add(estimate) for server, estimate in measured.items()]
        if len(times_s) < sum(load > 0 for load in self._loads.values()) or not times_s:
            return None  # some server said nothing: no telling how long the step was
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
        if self._look_again and len(self._seen_s) == _SEEN:  # by now speeds are known better
            self._look_again = False
            return self._go_on()
        return self._probe()

    def with_servers(self, servers: Collection[int]) -> Change | None:
        """Servers have come or gone.

        The slices of those that are gone go to all others. To new ones, which count as usually fast
        until they have shown otherwise, goes as little as makes all finish together.

        Args:
            servers: that live now.

        Returns:
            What to change; None if they are the same as before.

        Raises:
            InvalidUsage: none lives.
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
    def settled(self) -> bool:
        """Whether nothing is on trial, and enough steps have been seen since the last change."""
        return self._trial is None and len(self._seen_s) == _SEEN

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes by slice."""
        return self._sizes

    def step_speeds(self) -> dict[int, float]:
        """Bytes of a step that each server moves a second; a step may have several passes."""
        return {server: speed / self._passes for server, speed in self.speeds().items()}

    def _noise(self) -> float:
        return median(estimate.noise for estimate in self._estimates.values())

    def _loads_now(self) -> dict[int, int]:
        return {**dict.fromkeys(self._estimates, 0), **self._assignment.loads(self._sizes)}

    def _on_trial(self, trial: Trial, step_s: float) -> Change | None:
        verdict = trial.step(step_s)
        if verdict is None:
            return None
        self._trial = None
        if not trial.probe:
            if verdict is Verdict.KEEP:
                return self._go_on()
            self._detector.futile()
            return self._roll_back(trial)
        if trial.news and (correction := self._correct()):
            return correction
        if verdict is Verdict.KEEP:
            self._exploration.found()
            return None
        self._exploration.failed()
        return self._roll_back(trial)

    def _correct(self) -> Change | None:
        """What measurements ask for, if it is worth it."""
        correction = self._rebalanced(self._noise())
        self._look_again = correction is not None
        return correction

    def _go_on(self) -> Change | None:
        """The next round of a correction, if there has to be one."""
        doubt = self._noise() / 4  # what is known of speeds is an average of some steps
        speeds = self.speeds()
        times_s = {server: load / speeds[server] for server, load in self._loads.items() if load}
        late = max(imbalance(times_s, self._loads).values())
        return self._rebalanced(doubt) if late > _STILL + doubt else None

    def _rebalanced(self, doubt: float) -> Change | None:
        """A correction. ``doubt``: a gain of so much may be noise."""
        now, speeds = self._assignment.owner, self.speeds()
        in_the_end = rebalance(now, self._sizes, speeds)
        before_s, after_s = (longest_s(each, self._sizes, speeds) for each in (now, in_the_end))
        if after_s > (_WORTH - doubt) * before_s:
            return None
        owner = rebalance(now, self._sizes, speeds, most_bytes=_ROUND * sum(self._sizes))
        self._trial = Trial(now, list(self._seen_s)[-PATIENCE:], PATIENCE, probe=False)
        return self._change_to(owner, "correction")

    def _probe(self) -> Change | None:
        """A guess, if it is time for one and it may cost what it would by all that is known."""
        ready = self._explore and len(self._seen_s) == _SEEN and self._detector.quiet
        if not ready or len(self._estimates) < 2 or not self._exploration.is_time():
            return None
        now, speeds = self._assignment.owner, self.speeds()
        owner = self._exploration.guess(now, self._sizes, speeds)
        now_s, then_s = (longest_s(each, self._sizes, speeds) for each in (now, owner))
        if not self._exploration.affordable(now_s, then_s):
            return None
        self._trial = Trial(now, list(self._seen_s), STEPS, probe=True)
        return self._change_to(owner, "probe")

    def _roll_back(self, trial: Trial) -> Change:
        self._trial = None
        return self._change_to(trial.owner, "roll_back")

    def _change_to(self, owner: Sequence[int], why: str) -> Change:
        moves = moves_between(self._assignment.owner, owner, self._sizes)
        self._assignment = self._assignment.changed_to(owner)
        self._loads = self._loads_now()
        self._settling = _WARM_UP
        self._seen_s.clear()
        self._detector.changed()
        for estimate in self._estimates.values():
            estimate.loosen()
        return Change(self._assignment, moves, why)
