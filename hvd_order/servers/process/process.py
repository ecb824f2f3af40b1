"""A parameter server: ``hvd-order serve``, which ``hvd-order run --servers N`` starts N times."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from hvd_order._native import _torch as native
from hvd_order.base.config import Config
from hvd_order.base.errors import HvdOrderError, InvalidUsage
from hvd_order.base.same_model import name_ranks
from hvd_order.servers.access.secret import load_secret
from hvd_order.servers.process import heartbeat
from hvd_order.servers.worker import connections

__all__ = ["ServerProcess", "serve"]

_STORE_PATIENCE = timedelta(seconds=60)  # for a store that is about to start

_log = logging.getLogger("hvd_order")

_PARTING_S = 10.0  # for the workers of a job that has failed


class ServerProcess:
    """One server of a job: its connections, and the decision when it may end.

    Attributes:
        number: number of this server.
    """

    def __init__(self, config: Config, workers: int, key: bytes, listen: bool = False) -> None:
        """Announces the server; workers may connect from now on.

        Args:
            config: the knobs.
            workers: number of workers of the job.
            key: the job's secret.
            listen: be the store where all processes meet.

        Raises:
            InvalidUsage: the store's address is missing.
            PeerLost: the store cannot be reached.
        """
        if config.server_store is None:
            raise InvalidUsage(
                "a parameter server must know where to meet the others: HVD_ORDER_SERVER_STORE"
            )
        self._workers = workers
        self._timeout = config.timeout
        self._key = key
        self._meeting = connections.MeetingPoint(
            config.server_store, config.timeout, listen, min(config.timeout, _STORE_PATIENCE)
        )
        self._store = self._meeting.own()
        self.number = self._meeting.count("servers")
        self._changed = threading.Condition()  # guards the fields below
        self._at_hand: set[tuple[str, int]] = set()
        self._links: dict[tuple[str, int], native.PairConnection] = {}
        self._server_joined: set[int] = set()  # workers, including those that have left
        self._ready_workers: set[int] = set()
        self._expected: set[int] | None = None  # servers that it must be connected to
        self._is_ready = False
        self._left = 0
        self._broken: list[str] = []
        self._told_to_leave = False
        self._away_s = 0.0  # pause after which other processes gave it up
        self._heartbeat = heartbeat.Heartbeat(
            self._meeting, self.number, heartbeat.longest_silence(config)
        )
        self._core = native.ServerCore(
            server=self.number,
            workers=workers,
            synchronous=config.ps_mode == "sync",
            staleness=config.ps_staleness,
            delay_bound=config.ps_delay_bound,
            aggregates=config.ps_aggregate,
            ordered=config.policy == "priority",
            divergence_bound=config.ps_divergence,
            log=lambda text: _log.warning("server %d: %s", self.number, text),
            on_control=self._on_control,
            on_gone=self._on_gone,
            was_away=self._was_away,
        )
        self._door = connections.Door(
            self._meeting, key, self.number, self._welcome,
            lambda text: _log.warning("server %d: %s", self.number, text),
        )  # fmt: skip
        self._store.set(f"server/{self.number}", connections.host_name())
        self._lookout = connections.Lookout(self._meeting, self.number + 1, self._go_to)

    # ---- connections --------------------------------------------------------------------------

    def _welcome(self, identity: str, link: native.PairConnection) -> None:
        kind, _, number = identity.partition(" ")
        known = kind in ("worker", "server", "observer") and number.isdecimal()
        if not known or (kind == "worker" and int(number) >= self._workers):
            raise InvalidUsage(f"{identity!r} is nobody that this job has")
        self._add(kind, int(number), link)

    def _go_to(self, server: int) -> None:
        try:
            link = connections.take_part(
                self._meeting, self._key, f"server {self.number}", server, self._timeout
            )
            self._add("server", server, link)
        except HvdOrderError as error:
            _log.warning("server %d: no link to server %d: %s", self.number, server, error)

    def _add(self, kind: str, number: int, link: native.PairConnection) -> None:
        self._core.connect(kind, number, link)
        with self._changed:
            self._at_hand.add((kind, number))
            self._links[kind, number] = link
            if kind == "worker":
                self._server_joined.add(number)
                self._changed.notify_all()
        self._announce_if_ready()

    def _announce_if_ready(self) -> None:
        with self._changed:
            at_hand = {number for kind, number in self._at_hand if kind == "server"}
            if (
                self._is_ready
                or self._expected is None
                or not self._expected <= at_hand
                or len(self._ready_workers) < self._workers
            ):
                return
            self._is_ready = True
        self._meeting.own().set(f"server/{self.number}/ready", "1")

    # ---- messages over them -------------------------------------------------------------------

    def _on_control(self, peer: tuple[str, int], text: str) -> None:
        kind, number = peer
        try:
            message: Any = json.loads(text)
            what = message["what"]
            if what == "ready" and kind == "worker":
                with self._changed:
                    self._ready_workers.add(number)
                    if number == 0:
                        self._expected = {int(each) for each in message["servers"]} - {self.number}
                self._announce_if_ready()
            elif what == "audit":
                answer = {"what": "audit", "server": self.number, "held": self._core.audit()}
                self._core.send_control(kind, number, json.dumps(answer))
            elif what == "late":
                late = sorted(self._core.late_workers())
                answer = {"what": "late", "server": self.number, "workers": late}
                self._core.send_control(kind, number, json.dumps(answer))
            elif what == "record" and kind == "worker":
                self._record(number, True)
            elif what == "times" and kind == "worker":
                self._record(number, False)
                self._core.send_control(kind, number, json.dumps(self._times(number)))
            elif what == "leave" and kind in ("worker", "observer"):
                with self._changed:
                    self._told_to_leave = True
                    self._changed.notify_all()
            else:
                raise ValueError(f"nothing for a {kind} to say")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            _log.warning(
                "server %d: refused a message of %s %d: %s", self.number, kind, number, error
            )

    def _record(self, worker: int, on: bool) -> None:
        with self._changed:
            link = self._links["worker", worker]
        link.record(on)
        self._core.record_updates(on)

    def _times(self, worker: int) -> dict[str, Any]:
        with self._changed:
            link = self._links["worker", worker]
        return {
            "what": "times",
            "server": self.number,
            "host": connections.host_name(),
            "pushes": link.take_received(),
            "updates": self._core.take_updates(),
        }

    def _on_gone(self, peer: tuple[str, int], why: str) -> None:
        with self._changed:
            self._at_hand.discard(peer)
            self._links.pop(peer, None)
            if peer[0] == "worker":
                self._left += 1
                if why:
                    self._broken.append(f"rank {peer[1]}: {why}")
            self._changed.notify_all()

    def _was_away(self) -> bool:
        """Returns whether a loss is this server's own: the other processes have given it up. Then
        it ends.
        """
        away_s = self._heartbeat.away_s()
        if away_s > 0:
            with self._changed:
                self._away_s = away_s
                self._told_to_leave = True
                self._changed.notify_all()
        return away_s > 0

    # ---- the end ------------------------------------------------------------------------------

    def run(self) -> int:
        """Serves until all workers have left, or until a message tells the server to leave.

        Returns:
            0; 1 if a worker left without an announcement, or did not connect within
            ``HVD_ORDER_TIMEOUT``, or the other processes have given this server up.
        """
        timeout_s = self._timeout.total_seconds()
        with self._changed:
            if not self._wait_for(lambda: len(self._server_joined) == self._workers, timeout_s):
                missing = sorted(set(range(self._workers)) - self._server_joined)
                self._broken.append(
                    f"{name_ranks(missing)} of {self._workers} did not come within {timeout_s:g} s "
                    "(HVD_ORDER_TIMEOUT), so nothing can be served; look at their output"
                )
            else:
                self._wait_for(lambda: self._left >= self._workers or self._core.has_failed())
                # A stopped worker closes no connection; all other workers have received the cause.
                if not self._wait_for(lambda: self._left >= self._workers, _PARTING_S):
                    here = sorted(number for kind, number in self._at_hand if kind == "worker")
                    self._broken.append(
                        f"the job has failed, and {name_ranks(here)} did not leave within "
                        f"{_PARTING_S:g} s"
                    )
        self._lookout.close()
        self._door.close()
        with self._changed:
            self._links.clear()  # the last to hold a connection must not be the interpreter's end
        self._core.stop()
        if self._away_s > 0:
            _log.warning(
                "server %d: this process did not run for %.0f s, so the job has gone on, or ended, "
                "without it",
                self.number,
                self._away_s,
            )
        self._heartbeat.close()
        for broken in self._broken:
            _log.warning("server %d: %s", self.number, broken)
        return 1 if self._broken or self._away_s > 0 else 0

    def _wait_for(self, event: Callable[[], bool], seconds: float | None = None) -> bool:
        """Waits, with the lock held, for the event or the order to leave; returns whether one
        came.
        """
        return self._changed.wait_for(lambda: self._told_to_leave or event(), seconds)


def serve(workers: int, environ: Mapping[str, str], listen: bool = False) -> int:
    """Runs one parameter server, configured by the environment, until its job ends.

    Args:
        workers: number of workers of the job.
        environ: the environment variables.
        listen: be the store where all processes meet.

    Raises:
        InvalidUsage: settings are missing or wrong.
        PeerLost: the store cannot be reached.
    """
    config = Config.from_environment(environ)
    return ServerProcess(config, workers, load_secret(environ), listen).run()


if __name__ == "__main__":  # started by the launcher; users run hvd-order serve
    logging.basicConfig(format="%(message)s")
    try:
        code = serve(int(sys.argv[1]), os.environ)
    except HvdOrderError as error:
        raise SystemExit(f"hvd_order: {error}") from error
    raise SystemExit(code)
