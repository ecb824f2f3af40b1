"""Makes the processes of jobs what the policy wants them to be, step by step.

A slot goes to another job only after the job that had it has let it go: two models in the memory
of one device would end both. A job that waits for a slot of a job which itself waits gives up what
it will not need, so that no two wait for each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.serve.jobs_file import ServedJob
from hvd_order.cluster.serve.runner import Runner, Slots, counts

__all__ = ["Phase", "Processes", "ProcessesEnded"]

_RETRY_S = 2.0  # after a failure; twice as long each time


class Phase(Enum):
    """What the processes of a job do."""

    OFF = "waits"
    ON = "runs"
    STOPPING = "stops"


@dataclass(frozen=True)
class ProcessesEnded:
    """A job's processes have ended.

    Attributes:
        code: exit code; None: it was killed.
        asked: whether it was asked to stop.
        cause: what is known beside the exit code; empty: nothing.
    """

    name: str
    code: int | None
    asked: bool
    cause: str = ""


@dataclass
class _Managed:
    """A job.

    Attributes:
        wanted: workers by machine, as the policy wants; empty: none.
        given: slots that it was given last.
        before: slots that it had before and may still use.
        deadline: by then it must have stopped, or have let go of ``before``; else it is ended.
        retry_at: not started before; both on the monotonic clock.
        leaves: it is forgotten when it has ended.
    """

    served: ServedJob
    wanted: dict[str, int] = field(default_factory=dict)
    given: dict[str, tuple[int, ...]] = field(default_factory=dict)
    before: dict[str, set[int]] = field(default_factory=dict)
    phase: Phase = Phase.OFF
    deadline: float | None = None
    retry_at: float = 0.0
    failures: int = 0
    cause: str = ""
    leaves: bool = False


class Processes:
    """The processes of all jobs.

    Args:
        slots: of each machine.
        patience_s: longest wait for a job that shall stop, or shall let slots go; it is ended then.
        say: told of each change, with the job's name and a text.
    """

    def __init__(
        self,
        runner: Runner,
        slots: Mapping[str, int],
        patience_s: float,
        say: Callable[[str, str], None],
    ) -> None:
        self._runner = runner
        self._slots = dict(slots)
        self._patience_s = patience_s
        self._say = say
        self._jobs: dict[str, _Managed] = {}
        self._refused: list[ProcessesEnded] = []

    def add(self, served: ServedJob) -> None:
        """A job has arrived."""
        self._jobs[served.job.name] = _Managed(served)

    def remove(self, name: str) -> None:
        """A job has left. If it runs, it is asked to stop, and has its slots until it has."""
        managed = self._jobs[name]
        managed.wanted, managed.leaves = {}, True
        self._refused = [ended for ended in self._refused if ended.name != name]
        if managed.phase is Phase.OFF:
            del self._jobs[name]

    def want(self, name: str, workers: Mapping[str, int]) -> None:
        """Sets what a job shall have."""
        self._jobs[name].wanted = dict(workers)

    def find(self, name: str) -> None:
        """Takes over a job that an earlier scheduler has started, if it runs or is complete."""
        slots = self._runner.find(name)
        if slots is None:
            return
        seen = self._runner.look(name)
        if seen.running or seen.code == 0:
            managed = self._jobs[name]
            managed.given, managed.phase = dict(slots), Phase.ON

    def failed(self, name: str) -> int:
        """Notes a failure, after which a job is started again later. Returns the number so far."""
        managed = self._jobs[name]
        managed.retry_at = time.monotonic() + _RETRY_S * 2**managed.failures
        managed.failures += 1
        return managed.failures

    def phase(self, name: str) -> Phase:
        """What a job's processes do."""
        return self._jobs[name].phase

    def given(self, name: str) -> Mapping[str, int]:
        """Workers by machine that a job was given last."""
        return counts(self._jobs[name].given)

    def failures(self, name: str) -> int:
        """How often a job has failed."""
        return self._jobs[name].failures

    def any_running(self) -> bool:
        """Whether processes of any job may run."""
        return any(managed.phase is not Phase.OFF for managed in self._jobs.values())

    def stop_all(self) -> None:
        """Asks all jobs to stop at their next commits."""
        for name, managed in self._jobs.items():
            if managed.phase is Phase.ON:
                self._stop(name, managed, "is asked to stop")

    def kill_all(self) -> None:
        """Ends all jobs at once."""
        for name, managed in self._jobs.items():
            if managed.phase is not Phase.OFF:
                self._kill(name, managed, "it was ended at once")

    def look(self) -> list[ProcessesEnded]:
        """Looks at all jobs; ends those that are too slow to stop or to let slots go."""
        ended, self._refused = self._refused, []
        for name, managed in list(self._jobs.items()):
            if managed.phase is Phase.OFF:
                continue
            seen = self._runner.look(name)
            if not seen.running and managed.leaves:
                del self._jobs[name]
                self._say(name, "has ended")
                continue
            if not seen.running:
                asked = managed.phase is Phase.STOPPING
                ended.append(ProcessesEnded(name, seen.code, asked, managed.cause))
                managed.phase, managed.given, managed.before = Phase.OFF, {}, {}
                managed.deadline, managed.cause = None, ""
                continue
            if managed.phase is Phase.ON and managed.before and seen.within_slots:
                managed.before, managed.deadline = {}, None
            if managed.deadline is not None and time.monotonic() > managed.deadline:
                did = "stop" if managed.phase is Phase.STOPPING else "let its slots go"
                cause = f"it did not {did} within {self._patience_s:g} s"
                self._kill(name, managed, cause)
        return ended

    def adapt(self) -> None:
        """Starts, changes and stops jobs as far as slots are free by now."""
        changing = {
            name: managed
            for name, managed in self._jobs.items()
            if managed.phase is Phase.ON and managed.wanted != counts(managed.given)
        }
        for name, managed in list(changing.items()):
            if not managed.wanted or not self._runner.resizes:
                self._stop(name, managed, "is asked to stop at its next commit")
                del changing[name]
        moved = True
        while moved:  # a change may leave slots to another job, or need those of one
            moved = False
            for name, managed in list(changing.items()):
                slots = self._find_slots(managed, managed.given)
                if slots is not None:
                    self._change(name, managed, slots)
                    del changing[name]
                    moved = True
        self._break_circle(changing)
        for name, managed in self._jobs.items():
            if managed.phase is Phase.OFF and managed.wanted:
                slots = self._find_slots(managed, {})
                if slots is not None and time.monotonic() >= managed.retry_at:
                    self._start(name, managed, slots)

    def _start(self, name: str, managed: _Managed, slots: dict[str, tuple[int, ...]]) -> None:
        try:
            self._runner.start(managed.served, slots)
        except (OSError, InvalidUsage) as error:
            self._refused.append(ProcessesEnded(name, None, False, str(error)))
            managed.retry_at = math.inf  # until `failed` says when
            return
        managed.given, managed.phase = slots, Phase.ON
        self._say(name, f"is started on {_text(counts(slots))}")

    def _change(self, name: str, managed: _Managed, slots: dict[str, tuple[int, ...]]) -> None:
        for machine, numbers in managed.given.items():
            gone = set(numbers) - set(slots.get(machine, ()))
            if gone:
                managed.before.setdefault(machine, set()).update(gone)
        self._runner.give(name, slots)
        managed.given = slots
        if managed.before:
            managed.deadline = time.monotonic() + self._patience_s
        self._say(name, f"goes on with {_text(counts(slots))} from its next commit on")

    def _break_circle(self, stuck: Mapping[str, _Managed]) -> None:
        """Makes one of the jobs that wait for one another let go what it will not need."""
        waiting = dict(stuck)
        comes = True
        while comes:  # jobs that wait for slots that are being let go will move by themselves
            comes = False
            for name, managed in list(waiting.items()):
                if not self._blocked(managed, waiting):
                    del waiting[name]
                    comes = True
        for name, managed in waiting.items():
            common = {
                machine: numbers[: managed.wanted[machine]]
                for machine, numbers in managed.given.items()
                if managed.wanted.get(machine)
            }
            if common == managed.given:
                continue
            if sum(counts(common).values()) >= managed.served.job.least:
                self._change(name, managed, common)
            else:
                self._stop(name, managed, "is asked to stop, to make room")
            return

    def _blocked(self, managed: _Managed, waiting: Mapping[str, _Managed]) -> bool:
        """Whether a job waits for slots that jobs have which wait themselves."""
        for machine, count in managed.wanted.items():
            for name, other in self._jobs.items():
                if other is managed or other.phase is Phase.STOPPING:
                    continue
                has = len(other.given.get(machine, ()))
                stays = has if name in waiting else min(has, other.wanted.get(machine, 0))
                count += stays
            if count > self._slots[machine]:
                return True
        return False

    def _find_slots(self, managed: _Managed, own: Slots) -> dict[str, tuple[int, ...]] | None:
        """Slots for what a job shall have, those that it has first; None: they are not free."""
        found = {}
        for machine, count in managed.wanted.items():
            kept = own.get(machine, ())[:count]
            taken = self._taken(machine)
            free = [k for k in range(self._slots[machine]) if k not in taken]
            if len(kept) + len(free) < count:
                return None
            found[machine] = (*kept, *free[: count - len(kept)])
        return found

    def _taken(self, machine: str) -> set[int]:
        taken: set[int] = set()
        for managed in self._jobs.values():
            taken.update(managed.given.get(machine, ()))
            taken.update(managed.before.get(machine, ()))
        return taken

    def _stop(self, name: str, managed: _Managed, text: str) -> None:
        self._runner.stop(name)
        managed.phase = Phase.STOPPING
        managed.deadline = time.monotonic() + self._patience_s
        self._say(name, text)

    def _kill(self, name: str, managed: _Managed, cause: str) -> None:
        self._runner.kill(name)
        managed.cause = cause
        managed.deadline = time.monotonic() + self._patience_s
        self._say(name, cause)


def _text(workers: Mapping[str, int]) -> str:
    return ", ".join(f"{machine}:{count}" for machine, count in workers.items())
