"""Drives a job over several hosts, or an elastic job: one agent a host, formation after formation.

An event loop over the agents' messages. A job that is not elastic has one formation, and its first
failure ends it. An elastic job forms anew when a worker fails, a host is lost, or hosts join or
leave; workers then continue from their last commit (hvd_order/launch/elastic).
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.hosts import Host, discover_hosts, share
from hvd_order.launch.jobs.agent_process import AgentProcess, Event
from hvd_order.launch.jobs.formation_file import note_formation
from hvd_order.launch.jobs.formations import WorkerFailure
from hvd_order.launch.request import LaunchRequest

__all__ = ["Driver", "explain"]

_TICK_S = 1.0
_STOP_S = 40.0  # torch's agent gives its workers 30 s
_KILL_S = 5.0
_FAILURES_WITHOUT_COMMIT = 3
_MOST_NAMED = 4


def explain(failure: WorkerFailure, where: str = "") -> str:
    """Describes how a worker ended, and others that failed at the same time."""
    ends = [(failure.rank, failure.code), *failure.others]
    more = len(ends) - _MOST_NAMED
    named = ", ".join(f"rank {rank}{where} {_end(code)}" for rank, code in ends[:_MOST_NAMED])
    return named + (f" and {more} more" if more > 0 else "")


def _end(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    named = -code in set(signal.Signals)  # most real-time signals have no name
    return f"was ended by {signal.Signals(-code).name if named else f'signal {-code}'}"


@dataclass
class _MemberHost:
    """A host in the job."""

    process: AgentProcess
    ready: bool = False
    address: str | None = None
    launcher: str | None = None  # launcher's address as seen from that host
    has_state: bool = False  # whether it was in a formation, and so may have the last commit
    deadline: float | None = None  # by then it must be ready, or have begun the formation


def _failure(message: Mapping[str, Any]) -> WorkerFailure:
    others = [(rank, code) for rank, code in message.get("others", ())]
    return WorkerFailure(message["rank"], message["code"], others)


class _Ended(Exception):  # noqa: N818  (the way out of the event loop)
    """The job is over, with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Driver:
    """Runs one request; use it once.

    Attributes:
        stopped_by: the signal that ended the job; None: it ended otherwise.
    """

    def __init__(self, request: LaunchRequest) -> None:
        self.stopped_by: int | None = None
        self._request = request
        self._rules = request.elastic
        self._events: queue.Queue[Event] = queue.Queue()
        self._available = request.hosts or [Host("localhost", request.process_count)]
        self._members: dict[str, _MemberHost] = {}  # in the order of the ranks
        self._excluded: dict[str, float] = {}  # host -> when it may be used again
        self._formation = 0
        self._in_formation: list[Host] = []
        self._broken = False  # whether the formation has failed, so that another must follow
        self._serving: str | None = None  # host asked for a store for the formation
        self._finished: set[str] = set()
        self._commit = 0  # newest commit that an agent reported
        self._commit_at_failure = -1
        self._failures = 0  # in a row, without a new commit
        self._last_code = 1
        self._left: list[AgentProcess] = []  # agents of hosts that are no longer members
        self._hosts_deadline: float | None = None  # by then there must be enough hosts
        self._closing = threading.Event()

    def run(self) -> int:
        """Runs the job and ends everything that it started.

        Returns:
            See `hvd_order.launch.run.run`.
        """
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, _interrupt) if in_main else None
        try:
            if self._rules is not None and self._rules.discovery_script is not None:
                self._available = discover_hosts(
                    self._rules.discovery_script, self._rules.default_slots
                )
                threading.Thread(target=self._discover, daemon=True).start()
            self._adapt()
            while True:
                self._step()
        except _Ended as end:
            return end.code
        except KeyboardInterrupt as interrupt:
            self.stopped_by = int(interrupt.args[0] if interrupt.args else signal.SIGINT)
            return 128 + self.stopped_by
        finally:
            self._closing.set()
            processes = [*self._left, *(member.process for member in self._members.values())]
            try:
                for process in processes:
                    if self._is_preempted():
                        process.leave()
                    else:
                        process.stop()
                for process in processes:
                    process.wait(_STOP_S)
            except KeyboardInterrupt:  # a second Ctrl-C ends the job at once
                handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                for process in processes:
                    process.kill()
                for process in processes:
                    process.wait(_KILL_S)
                signal.signal(signal.SIGINT, handler)
            if in_main:
                signal.signal(signal.SIGTERM, before)
            while not self._events.empty():  # what agents sent on their way out
                sender, message = self._events.get()
                if message["what"] == "outcome":
                    self._take_outcome(sender, message)

    # ---- events ----

    def _step(self) -> None:
        try:
            sender, message = self._events.get(timeout=_TICK_S)
        except queue.Empty:
            self._tick()
            return
        what = message["what"]
        if what == "hosts":
            self._available = message["hosts"]
            self._adapt()
        elif what == "discovery failed":
            self._say(message["text"])
        elif what == "outcome":
            self._take_outcome(sender, message)
        elif sender in self._left:
            if what == "ended":
                self._left.remove(sender)
                self._note(began=self._all_began())
        elif sender is not None:
            member = self._members.get(sender.host)
            if member is not None and member.process is sender:
                self._take(sender.host, member, message)
        self._tick()

    def _take_outcome(self, sender: AgentProcess | None, message: dict[str, Any]) -> None:
        if self._request.call is not None and sender is not None:
            self._request.call.take(sender.host, message)

    def _take(self, host: str, member: _MemberHost, message: dict[str, Any]) -> None:
        what = message["what"]
        self._commit = max(self._commit, message.get("commit", 0))
        if what == "ready":
            member.ready, member.deadline = True, None
            member.address, member.launcher = message["address"], message["launcher"]
            self._adapt()
        elif (
            what == "serving" and message["formation"] == self._formation and host == self._serving
        ):
            if not self._broken:  # else a host of the formation is already lost
                self._announce(message["port"])
        elif what == "began" and message["formation"] == self._formation:
            member.deadline = None
            self._note(began=self._all_began())
        elif what == "finished" and message["formation"] == self._formation:
            self._finished.add(host)
            if self._finished >= {each.name for each in self._in_formation}:
                for each in self._members.values():
                    each.process.send({"what": "leave"})
                raise _Ended(0)
        elif what == "failed" and message["formation"] == self._formation:
            self._worker_failed(host, _failure(message))
        elif what == "error":
            self._say(f"{host}: {message['text']}")
            self._lost(host, 2)
        elif what == "ended":
            self._say_why_it_ended(host, member, message["code"])
            self._lost(host, 1)

    def _tick(self) -> None:
        """Handles deadlines."""
        now = time.monotonic()
        freed = [host for host, until in self._excluded.items() if until <= now]
        for host in freed:
            del self._excluded[host]
        if freed:
            self._adapt()
        for host, member in list(self._members.items()):
            if member.deadline is not None and now > member.deadline:
                said = "; ".join(member.process.last_errors)
                self._say(f"{host} did not answer in time" + (f": {said}" if said else ""))
                self._lost(host, 1)
        if self._hosts_deadline is not None and now > self._hosts_deadline:
            self._say(
                f"there were no hosts for {self._least()} processes within {self._timeout_s():g} s"
            )
            raise _Ended(1)

    # ---- reactions ----

    def _adapt(self) -> None:
        """Adapts agents and formation to the available hosts."""
        if self._finished and not self._broken:
            return  # the job is about to end by itself
        usable = [host for host in self._available if host.name not in self._excluded]
        # Current members stay in front: their ranks, 0 first, have the newest state.
        order = list(self._members)
        usable.sort(key=lambda host: order.index(host.name) if host.name in order else len(order))
        wanted = share(usable, self._most())
        if sum(host.slots for host in wanted) < self._least():
            if self._hosts_deadline is None:
                count = sum(host.slots for host in wanted)
                self._say(
                    f"hosts for {count} processes, {self._least()} are needed; waiting for more"
                )
                self._hosts_deadline = time.monotonic() + self._timeout_s()
            return
        self._hosts_deadline = None
        in_use = {host.name for host in (*wanted, *self._in_formation)}
        for name in [name for name in self._members if name not in in_use]:
            process = self._members.pop(name).process
            process.stop()
            self._left.append(process)
        for host in wanted:
            if host.name not in self._members:
                name = f"[{host.name}]" if self._several_hosts() else ""
                self._members[host.name] = _MemberHost(
                    AgentProcess(host.name, host.slots, self._request, self._events, name),
                    deadline=time.monotonic() + self._request.start_timeout_s,
                )
        ready = [host for host in wanted if self._members[host.name].ready]
        if ready != wanted and (
            self._formation == 0 or sum(h.slots for h in ready) < self._least()
        ):
            return
        if self._broken or ready != self._in_formation:
            self._form(ready)

    def _form(self, hosts: list[Host]) -> None:
        """Begins a formation with `hosts`, and releases all other hosts."""
        if self._finished:
            self._say(
                "a worker failed or a host was lost after others had finished; ending the job"
            )
            raise _Ended(self._last_code)
        limit = self._rules.reset_limit if self._rules is not None else None
        if limit is not None and self._formation > limit:
            self._say(f"the job has formed anew {limit} times, the --reset-limit; ending it")
            raise _Ended(self._last_code)
        stay = {host.name for host in hosts}
        if self._formation and not (self._keeps_state_elsewhere() or self._any_has_state(stay)):
            self._say(
                "no host that has the last commit is left; keep one when hosts change, or name a "
                "shared directory in HVD_ORDER_ELASTIC_DIR"
            )
            raise _Ended(self._last_code)
        for name in [name for name in self._members if self._members[name].ready]:
            if name not in stay:
                process = self._members.pop(name).process
                process.send({"what": "leave"})
                self._left.append(process)
        self._formation += 1
        self._in_formation, self._broken = hosts, False
        self._serving = hosts[0].name
        for name in stay:
            self._members[name].has_state = True
            self._members[name].deadline = time.monotonic() + self._timeout_s()
        self._members[self._serving].process.send(
            {
                "what": "serve",
                "formation": self._formation,
                "address": self._address_of(self._serving),
            }
        )

    def _announce(self, port: int) -> None:
        """Announces the formation to all its hosts once the port of the store is known."""
        assert self._serving is not None
        address = self._address_of(self._serving)
        size, first_rank = sum(host.slots for host in self._in_formation), 0
        for place, host in enumerate(self._in_formation):
            numbers = {
                "number": self._formation,
                "place": place,
                "host_count": len(self._in_formation),
                "first_rank": first_rank,
                "process_count": host.slots,
                "size": size,
                "address": address,
                "port": port,
                "devices": host.devices,
            }
            first_rank += host.slots
            self._members[host.name].process.send({"what": "formation", "formation": numbers})
        self._note(began=False)

    def _worker_failed(self, host: str, failure: WorkerFailure) -> None:
        self._last_code = failure.code if failure.code > 0 else 128 - failure.code
        where = f" on {host}" if self._several_hosts() else ""
        text = explain(failure, where)
        if self._rules is None:
            self._say(f"{text}; all others were stopped")
            raise _Ended(self._last_code)
        self._failures = 1 if self._commit > self._commit_at_failure else self._failures + 1
        self._commit_at_failure = self._commit
        if self._failures >= _FAILURES_WITHOUT_COMMIT:
            self._say(f"{text}, {self._failures} times in a row without a new commit in between")
            self._failures = 0
            self._lost(host, self._last_code)
            return
        self._say(f"{text}; starting all again")
        self._broken = True
        self._adapt()

    def _lost(self, host: str, code: int) -> None:
        """Continues without a host if possible."""
        member = self._members.pop(host)
        member.process.stop()
        self._left.append(member.process)
        self._last_code = code
        self._broken = self._broken or host in {each.name for each in self._in_formation}
        rules = self._rules
        cooldown = None if rules is None else rules.cooldown_s
        self._excluded[host] = math.inf if cooldown is None else time.monotonic() + cooldown
        usable = [each for each in self._available if self._excluded.get(each.name) != math.inf]
        enough = sum(each.slots for each in usable) >= self._least()
        if rules is None or not (enough or rules.discovery_script):
            self._say("all others were stopped" if self._several_hosts() else "the job has ended")
            raise _Ended(code)
        self._say(f"going on without {host}" + ("" if cooldown is None else f" for {cooldown:g} s"))
        self._adapt()

    def _note(self, *, began: bool) -> None:
        """Writes what the job uses to the file that the user named."""
        if self._rules is not None and self._rules.formation_file is not None:
            leaving = [process.host for process in self._left]
            try:
                note_formation(self._rules.formation_file, self._in_formation, leaving, began=began)
            except OSError as error:  # a full disk must not end training
                self._say(f"{self._rules.formation_file} cannot be written: {error.strerror}")

    # ---- queries ----

    def _is_preempted(self) -> bool:
        """Whether SIGTERM ends a job that can go on later, from the commit that it now makes."""
        elastic = self._rules is not None and self._keeps_state_elsewhere()
        return elastic and self.stopped_by == signal.SIGTERM

    def _all_began(self) -> bool:
        members = (self._members.get(host.name) for host in self._in_formation)
        return all(member is not None and member.deadline is None for member in members)

    def _most(self) -> int | None:
        return self._request.process_count if self._rules is None else self._rules.max_count

    def _least(self) -> int:
        if self._rules is None or self._formation == 0:
            return self._request.process_count
        return self._rules.min_count

    def _any_has_state(self, names: set[str]) -> bool:
        return any(self._members[name].has_state for name in names)

    def _keeps_state_elsewhere(self) -> bool:
        name = "HVD_ORDER_ELASTIC_DIR"
        return bool(self._request.env.get(name) or os.environ.get(name))

    def _timeout_s(self) -> float:
        return self._request.start_timeout_s if self._rules is None else self._rules.timeout_s

    def _several_hosts(self) -> bool:
        discovers = self._rules is not None and self._rules.discovery_script is not None
        return discovers or len(self._available) > 1

    def _address_of(self, host: str) -> str:
        """Address of a host for the other hosts: of its interface, as used by ssh, or its name."""
        member = self._members[host]
        if member.address is not None:
            return member.address
        if member.process.remote:
            return host.rpartition("@")[2]
        seen = (self._members[each.name].launcher for each in self._in_formation)
        elsewhere = any(self._members[each.name].process.remote for each in self._in_formation)
        return next(filter(None, seen), host if elsewhere else "127.0.0.1")

    def _say(self, text: str) -> None:
        if self._request.call is not None:
            self._request.call.messages.append(text)
        with contextlib.suppress(OSError):  # a closed output must not end the job
            sys.stderr.write(f"hvd-order: {text}\n")
            sys.stderr.flush()

    def _say_why_it_ended(self, host: str, member: _MemberHost, code: int) -> None:
        if member.ready:
            self._say(f"the connection to {host} broke, or its agent died (exit code {code})")
            return
        said = "; ".join(member.process.last_errors)
        cure = (
            f"; 'ssh {host} {sys.executable} --version' must work without a password"
            if member.process.remote
            else ""
        )
        self._say(f"nothing could be started on {host} (exit code {code}): {said}{cure}")

    def _discover(self) -> None:
        """Runs the discovery script every second; reports its failures once."""
        assert self._rules is not None
        assert self._rules.discovery_script is not None
        hosts, failed = list(self._available), False
        while not self._closing.wait(_TICK_S):
            try:
                found = discover_hosts(self._rules.discovery_script, self._rules.default_slots)
            except InvalidUsage as error:
                if not failed:
                    self._events.put((None, {"what": "discovery failed", "text": str(error)}))
                failed = True
                continue
            failed = False
            if sorted(found, key=str) != sorted(hosts, key=str):
                hosts = found
                self._events.put((None, {"what": "hosts", "hosts": found}))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)
