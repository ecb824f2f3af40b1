"""torch's elastic agent, led by the launcher's rounds (rounds.py) instead of a rendezvous server.

So ranks follow the order of the hosts, hosts may have different numbers of processes, and no
port of the launcher is open. The only module of this room that needs PyTorch.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.launcher.api import LaunchConfig

from hvd_order.launch.rounds import Failure, Round, Stopped

__all__ = ["RoundSource", "run_workers", "serve_store"]

_STORE_TIMEOUT = timedelta(seconds=300)
_NOT_LIMITED = 2**31 - 1  # restarts: the launcher decides, round by round


class RoundSource(Protocol):
    """Where an agent hears of rounds; see `hvd_order.launch.rounds.RoundInbox`."""

    def next_round(self, after: int, failure: Failure | None) -> Round: ...  # noqa: D102
    def newest(self) -> int: ...  # noqa: D102
    def finished(self) -> None: ...  # noqa: D102


def serve_store() -> TCPStore:
    """A store for the workers of one round, on a free port; it serves as long as it is kept."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)


def run_workers(
    command: Sequence[str],
    source: RoundSource,
    process_count: int,
    *,
    restart: bool,
    output_folder: Path | None,
    verbose: bool,
) -> Failure | None:
    """Starts this host's workers, round after round, and waits for them.

    Args:
        command: program and arguments of each worker.
        source: of rounds.
        process_count: of the first round, at a guess.
        restart: come for another round when a worker fails; else that ends all.
        output_folder: where the ranks' output goes; None: to ours.
        verbose: show the agent's log.

    Returns:
        The first failure, None when all workers succeeded.

    Raises:
        JobEnded: this host has no part in the job any more.
        Stopped: by a signal.
    """
    if not verbose:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="hvd_order_run_") as scratch:
        rendezvous = _Rendezvous(source)
        spec = WorkerSpec(
            role="worker",
            local_world_size=process_count,
            rdzv_handler=rendezvous,
            entrypoint=command[0],
            args=tuple(command[1:]),
            max_restarts=_NOT_LIMITED if restart else 0,
            numa_options=LaunchConfig(1, 1, process_count).numa_options,
        )
        rendezvous.spec = spec
        agent = _Agent(spec, source, rendezvous, _RankFiles(scratch, output_folder))
        try:
            result = agent.run()
        except SignalException as error:
            raise Stopped(int(error.sigval)) from None
        if not result.is_failed():
            return None
        return rendezvous.failure


class _Rendezvous(RendezvousHandler):
    """torch's view of the rounds."""

    def __init__(self, source: RoundSource) -> None:
        self.spec: WorkerSpec | None = None
        self.failure: Failure | None = None
        self._source = source
        self._run_id = uuid.uuid4().hex
        self._round = 0
        self._threads_given = "OMP_NUM_THREADS" in os.environ

    def next_rendezvous(self) -> RendezvousInfo:
        now = self._source.next_round(self._round, self.failure)
        self._round, self.failure = now.number, None
        assert self.spec is not None
        self.spec.local_world_size = now.process_count
        if not self._threads_given:
            threads = max(1, (os.cpu_count() or 1) // now.process_count)
            os.environ["OMP_NUM_THREADS"] = str(threads)
        store = TCPStore(
            now.address, now.port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
        )
        return RendezvousInfo(
            PrefixStore("hvd_order_agents", store),
            now.place,
            now.host_count,
            RendezvousStoreInfo(now.address, now.port),
        )

    def num_nodes_waiting(self) -> int:
        return int(self._source.newest() > self._round)  # then torch comes for the next round

    @property
    def use_agent_store(self) -> bool:
        return True  # the one that the round names is there before any worker is

    def get_backend(self) -> str:
        return "hvd_order"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):
    """Remembers who failed first, and says when this host is done."""

    def __init__(
        self, spec: WorkerSpec, source: RoundSource, rendezvous: _Rendezvous, logs: _RankFiles
    ) -> None:
        super().__init__(spec, logs)
        self._source = source
        self._rendezvous_handler = rendezvous

    def _monitor_workers(self, worker_group: WorkerGroup) -> Any:
        result = super()._monitor_workers(worker_group)
        # Those that the agent itself has stopped are listed as well, but ended later.
        failures = sorted(result.failures.items(), key=lambda item: _stopped(item[1].exitcode))
        if failures:
            rank, failure = failures[0]
            self._rendezvous_handler.failure = Failure(rank, failure.exitcode)
        elif result.state == WorkerState.SUCCEEDED:
            self._source.finished()
        return result


class _RankFiles(DefaultLogsSpecs):
    """Sends a rank's output to ``<folder>/rank.<rank>/stdout`` and ``stderr``, as horovodrun does.

    When ranks are started again, the names get a number: ``stdout.1``.
    """

    def __init__(self, scratch: str, folder: Path | None) -> None:
        super().__init__(log_dir=scratch)
        self._folder = folder
        self._starts = 0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = super().reify(envs)
        if self._folder is None:
            return destination
        suffix = f".{self._starts}" if self._starts else ""
        self._starts += 1
        for local_rank, env in envs.items():
            width = len(str(int(env["WORLD_SIZE"]) - 1))
            folder = self._folder / f"rank.{int(env['RANK']):0{width}d}"
            folder.mkdir(parents=True, exist_ok=True)
            destination.stdouts[local_rank] = str(folder / f"stdout{suffix}")
            destination.stderrs[local_rank] = str(folder / f"stderr{suffix}")
        return destination


def _stopped(code: int) -> bool:
    return code == -signal.SIGTERM
