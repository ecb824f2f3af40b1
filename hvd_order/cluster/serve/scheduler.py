"""A policy in real time: jobs arrive in a file, run as processes, and end."""

from __future__ import annotations

import contextlib
import fcntl
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.policies.interface import ClusterPolicy
from hvd_order.cluster.serve.jobs_file import SLOT, ServedJob, job_of, read_jobs
from hvd_order.cluster.serve.journal import Journal, decision_of, noted
from hvd_order.cluster.serve.ledger import Ledger
from hvd_order.cluster.serve.processes import Processes, ProcessesEnded
from hvd_order.cluster.serve.requests import CancelRequests
from hvd_order.cluster.serve.runner import Runner
from hvd_order.cluster.serve.status import ShownJob, last_lines, write_outcomes, write_status

__all__ = ["JobScheduler", "ServeRules"]

_TICK_S = 0.2
_SHOW_S = 2.0
_SETTLED_S = 1.0  # a jobs file that changed just now may be half written
_LOG_LINES = 5
_EARLY_S = 1e-6


@dataclass(frozen=True)
class ServeRules:
    """Rules of a real cluster.

    Attributes:
        slot_s: length of a slot: the policy is asked at the starts of slots alone; None: whenever
            something happens.
        resize_s: for which a job that starts or changes stands still; the policy is told so.
        restarts: how often a job that failed is started again.
        patience_s: longest wait for a job that shall stop or let slots go.
        once: end with the last job of the file.
    """

    slot_s: float | None = None
    resize_s: float = 10.0
    restarts: int = 2
    patience_s: float = 120.0
    once: bool = False

    def __post_init__(self) -> None:
        if self.slot_s is not None and not 0 < self.slot_s < math.inf:
            raise InvalidUsage(f"slots of {self.slot_s} s; expected more than 0")
        if self.resize_s < 0 or self.restarts < 0 or self.patience_s <= 0:
            raise InvalidUsage(f"a resize of {self.resize_s} s, {self.restarts} restarts and a "
                               f"patience of {self.patience_s} s; expected at least 0, 0 and more "
                               "than 0")  # fmt: skip


class JobScheduler:
    """Runs the jobs of a file. Use it once.

    The folder holds ``journal``, ``status.json``, ``outcomes.csv`` and the folder ``jobs``. A
    scheduler that finds a journal goes on from it.

    Args:
        folder: for its files.
        jobs_file: read again whenever it changes; a new line is a new job.
        machines: each with a number of slots.
        policy: asked as a simulator would ask it.
        runner: keeps its files in ``folder / "jobs"``.

    Raises:
        InvalidUsage: the jobs file is wrong, or another scheduler uses the folder.
        OSError: a file cannot be read or written.
    """

    def __init__(
        self,
        folder: Path,
        jobs_file: Path,
        machines: Machines,
        policy: ClusterPolicy,
        runner: Runner,
        rules: ServeRules,
    ) -> None:
        self._folder = folder
        self._jobs_file = jobs_file
        self._machines = machines
        self._policy = policy
        self._runner = runner
        self._rules = rules
        self._names = [machine.name for machine in machines.machines]
        slots = {m.name: int(m.capacity[SLOT]) for m in machines.machines}
        self._processes = Processes(runner, slots, rules.patience_s, self._say)
        self._ledger = Ledger(machines, rules.slot_s, rules.resize_s)
        self._journal = Journal(folder / "journal")
        self._origin = time.time()
        self._known: set[str] = set()
        self._coming: list[tuple[Mapping[str, str], ServedJob]] = []
        self._ends: dict[str, str] = {}  # how jobs have ended
        self._read_at: float | None = None  # modification time of the jobs file
        self._news = False  # something that the policy has to see
        self._changed = True  # something that the status has to show
        self._wake_s = math.inf
        self._next_slot_s = 0.0
        self._requests = CancelRequests(folder)
        self._shown_at = -math.inf

    def run(self, stop: threading.Event, at_once: threading.Event) -> int:
        """Serves until it shall stop, or until the last job has ended.

        Args:
            stop: when set, jobs are stopped at their next commits; a later call goes on with them.
            at_once: when set, jobs are ended without waiting.

        Returns:
            0; 1 if a job failed and ``rules.once``.

        Raises:
            InvalidUsage: the jobs file is wrong at the start, or the policy does what it cannot.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._only_scheduler():
            self._restore()
            self._coming_from_file(first=True)
            try:
                while not stop.is_set():
                    self._step()
                    if self._rules.once and not self._left():
                        break
                    stop.wait(_TICK_S)
            finally:
                self._shut_down(at_once)
                self._show()
        return int(self._rules.once and "failed" in self._ends.values())

    # ---- a moment ----

    def _now(self) -> float:
        return time.time() - self._origin

    def _left(self) -> bool:
        return bool(self._coming or self._ledger.waiting or self._ledger.running)

    def _step(self) -> None:
        self._coming_from_file(first=False)
        self._admit()
        for name in self._requests.take():
            self._cancel(name)
        for ended in self._processes.look():
            self._take(ended)
        if self._is_due():
            self._ask()
        self._processes.adapt()
        if self._changed or self._now() > self._shown_at + _SHOW_S:
            self._show()

    def _coming_from_file(self, *, first: bool) -> None:
        changed_at = self._jobs_file.stat().st_mtime if self._jobs_file.exists() else None
        if not first and (
            changed_at in (None, self._read_at) or time.time() - (changed_at or 0) < _SETTLED_S
        ):
            return
        self._read_at = changed_at
        try:
            jobs = read_jobs(self._jobs_file)
        except (InvalidUsage, OSError, UnicodeDecodeError) as error:
            if first:
                raise
            sys.stderr.write(f"hvd-order: {error}; new lines wait until this is mended\n")
            return
        for row, served in jobs:
            if served.job.name not in self._known:
                self._known.add(served.job.name)
                self._coming.append((row, served))

    def _admit(self) -> None:
        now_s = self._now()
        for row, served in [each for each in self._coming if each[1].job.arrival_s <= now_s]:
            self._coming.remove((row, served))
            # A line that was added later arrives now; so does one of the first at its time.
            late = now_s - served.job.arrival_s > 2 * _SETTLED_S
            row = {**row, "arrival_s": repr(now_s if late else served.job.arrival_s)}
            served = job_of(row)
            try:
                self._ledger.arrive(served.job, now_s)
            except InvalidUsage as error:
                self._say(served.job.name, f"is refused: {error}")
                self._ends[served.job.name] = "refused"
                continue
            self._journal.add("arrived", now_s, row=row)
            self._processes.add(served)
            self._news = True
            self._say(served.job.name, "has arrived")

    def _is_due(self) -> bool:
        now_s = self._now()
        if self._rules.slot_s is None:
            return self._news or now_s >= self._wake_s
        if now_s < self._next_slot_s or not (self._ledger.waiting or self._ledger.running):
            return False
        self._next_slot_s = self._rules.slot_s * (now_s // self._rules.slot_s + 1)
        return True

    def _ask(self) -> None:
        now_s = self._now()
        self._news = False
        told = self._read_progress()
        view = self._ledger.view(now_s)
        decision = self._policy.decide(view)
        if view.arrived or decision.reject or self._ledger.changed_by(decision):
            # A policy may want to be asked every second; what changes nothing is not kept.
            self._journal.add("asked", now_s, progress=told, **noted(decision))
        self._ledger.apply(decision, now_s)
        self._wake_s = math.inf if decision.wake_s is None else decision.wake_s
        if self._wake_s <= now_s - _EARLY_S:
            raise InvalidUsage(f"at {now_s} s the policy wants to be asked at {self._wake_s} s "
                               "again; expected a later time")  # fmt: skip
        for name in decision.reject:
            self._gone(name, "rejected")
        for name in decision.place:
            self._want(name)

    def _want(self, name: str) -> None:
        state = self._ledger.state(name)
        placement = None if state is None else state.placement
        parts = () if placement is None else placement.parts
        if any(part.servers for part in parts):
            raise InvalidUsage(f"the policy gives job {name!r} servers, which cannot be served")
        self._processes.want(name, {self._names[p.machine]: p.workers for p in parts})
        self._changed = True

    def _read_progress(self) -> dict[str, list[float]]:
        """Samples that running jobs have trained by their own account, and when they said so."""
        told = {}
        for name, state in self._ledger.running.items():
            path = self._folder / "jobs" / name / "commits" / "progress"
            try:
                samples = float(path.read_text(encoding="utf-8"))
                at_s = path.stat().st_mtime - self._origin
            except (OSError, ValueError):
                continue
            if at_s > state.since_s and 0 <= samples < math.inf:
                told[name] = [samples, at_s]
                self._ledger.progress(name, samples, at_s)
        return told

    # ---- ends ----

    def _take(self, ended: ProcessesEnded) -> None:
        name, now_s = ended.name, self._now()
        self._changed = True
        if ended.code == 0:
            self._journal.add("completed", now_s, job=name)
            self._ledger.leave(name, now_s, ended=True)
            self._gone(name, "completed")
            return
        if ended.asked:
            self._say(name, "has stopped")
            return
        why = ended.cause or (
            "its processes were killed" if ended.code is None else f"exit code {ended.code}"
        )
        count = self._processes.failed(name)
        self._journal.add("failed", now_s, job=name, why=why)
        log = self._runner.log(name)
        tail = "".join(f"\n    {line}" for line in last_lines(log, _LOG_LINES))
        if count <= self._rules.restarts:
            self._say(name, f"failed ({why}) and is started again: {log}{tail}")
            return
        self._journal.add("given up", now_s, job=name)
        self._ledger.leave(name, now_s, ended=False)
        self._gone(name, "failed", f" {count} times, at last by {why}: {log}{tail}")

    def _gone(self, name: str, how: str, more: str = "") -> None:
        self._processes.remove(name)
        self._ends[name] = how
        self._news = True
        self._say(name, f"{'has ' if how == 'completed' else ''}{how}{more}")
        write_outcomes(self._folder / "outcomes.csv", self._ledger.outcomes)

    def _cancel(self, name: str) -> None:
        coming = [each for each in self._coming if each[1].job.name == name]
        arrived = self._ledger.state(name) is not None
        if not coming and not arrived:
            self._say(name, "cannot be cancelled: it has ended, or is no job of this cluster")
            return
        now_s = self._now()
        self._journal.add("cancelled", now_s, job=name)
        if arrived:
            self._ledger.leave(name, now_s, ended=False)
            self._gone(name, "cancelled")
        else:
            self._coming.remove(coming[0])
            self._ends[name] = "cancelled"
            self._say(name, "cancelled")

    def _shut_down(self, at_once: threading.Event) -> None:
        self._processes.stop_all()
        until = time.monotonic() + 2 * self._rules.patience_s
        killed = False
        while self._processes.any_running() and time.monotonic() < until:
            for ended in self._processes.look():
                if ended.code == 0 or not ended.asked:
                    self._take(ended)
            if at_once.is_set() and not killed:
                self._processes.kill_all()
                killed = True
            time.sleep(_TICK_S / 4)
        self._journal.add("closed", self._now())

    # ---- restart ----

    @contextlib.contextmanager
    def _only_scheduler(self) -> Iterator[None]:
        with (self._folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InvalidUsage(f"another scheduler uses {self._folder}") from None
            yield

    def _restore(self) -> None:
        """Plays the journal: the policy is asked again with what it saw, so it knows it again."""
        about = [f"{m.name}:{m.capacity[SLOT]:g}" for m in self._machines.machines]
        empty = True
        cancelled = []
        for line in self._journal.read():
            what, at_s = line["what"], line["at_s"]
            empty = False
            if what == "begun":
                if line["machines"] != about:
                    before = ",".join(line["machines"])
                    raise InvalidUsage(f"{self._folder} is of a cluster with the hosts {before}; "
                                       "choose another --state")  # fmt: skip
                self._origin = line["origin"]
            elif what == "arrived":
                served = job_of(line["row"])
                self._known.add(served.job.name)
                self._ledger.arrive(served.job, at_s)
                self._processes.add(served)
            elif what == "asked":
                for name, (samples, when_s) in line["progress"].items():
                    self._ledger.progress(name, samples, when_s)
                self._policy.decide(self._ledger.view(at_s))
                decision = decision_of(line)
                self._ledger.apply(decision, at_s)
                for name in decision.reject:
                    self._processes.remove(name)
                    self._ends[name] = "rejected"
                for name in decision.place:
                    self._want(name)
            elif what == "failed":
                self._processes.failed(line["job"])
            elif what in ("completed", "given up"):
                self._ledger.leave(line["job"], at_s, ended=what == "completed")
                self._processes.remove(line["job"])
                self._ends[line["job"]] = "completed" if what == "completed" else "failed"
            elif what == "cancelled":
                self._known.add(line["job"])
                self._ends[line["job"]] = "cancelled"
                if self._ledger.state(line["job"]) is not None:
                    self._ledger.leave(line["job"], at_s, ended=False)
                    cancelled.append(line["job"])
        if empty:
            self._journal.add("begun", 0.0, origin=self._origin, machines=about)
            return
        self._news = True
        for name in (*self._ledger.running, *self._ledger.waiting, *cancelled):
            self._processes.find(name)
        for name in cancelled:
            self._processes.remove(name)

    # ---- what users see ----

    def _say(self, name: str, text: str) -> None:
        self._changed = True
        sys.stdout.write(f"{self._now():9.1f} s  {name}: {text}\n")
        sys.stdout.flush()

    def _show(self) -> None:
        """Replaces the status."""
        self._changed = False
        now_s = self._shown_at = self._now()
        jobs = [
            ShownJob(
                state.job.name,
                self._processes.phase(state.job.name).value,
                self._processes.given(state.job.name),
                now_s - state.job.arrival_s,
                min(state.done(now_s) / state.job.samples, 1.0),
                self._processes.failures(state.job.name),
            )
            for state in (*self._ledger.running.values(), *self._ledger.waiting.values())
        ]
        jobs += [ShownJob(name, how) for name, how in self._ends.items()]
        slots = {m.name: int(m.capacity[SLOT]) for m in self._machines.machines}
        write_status(self._folder, slots, jobs)
