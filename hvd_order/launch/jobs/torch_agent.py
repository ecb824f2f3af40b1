"""torch's elastic agent, driven by the launcher's formations (formations.py), not by a rendezvous.

Ranks follow the order of the hosts, hosts may have different numbers of processes, and the only
port is that of the workers' store. Agents get from the formation what torch's agents would ask each
other for, so a host that freezes or dies while the job forms delays no other host. This is the only
module of this package that needs PyTorch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Protocol

from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.launcher.api import LaunchConfig

from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.jobs.formations import Formation, Stopped, WorkerFailure
from hvd_order.launch.jobs.kill_with_parent import kill_with_children, kill_with_parent
from hvd_order.launch.jobs.lines import STDERR, STDOUT
from hvd_order.launch.jobs.rank_output import RankOutput
from hvd_order.launch.listening import listening_fd
from hvd_order.launch.request import OutputRules

__all__ = ["RoundSource", "run_workers", "serve_store"]

_STORE_TIMEOUT = timedelta(seconds=300)
_REACH_S = 30.0  # timeout of the connection to the first host
_FAIL_TOGETHER_S = 1.0  # for which others are waited for when a rank has failed
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_NOT_LIMITED = 2**31 - 1  # restarts: the launcher decides, formation by formation


class RoundSource(Protocol):
    """Source of an agent's formations; see `hvd_order.launch.jobs.formations.FormationInbox`."""

    def next_formation(self, after: int, failure: WorkerFailure | None) -> Formation: ...  # noqa: D102
    def newest(self) -> int: ...  # noqa: D102
    def finished(self) -> bool: ...  # noqa: D102


def serve_store(address: str) -> TCPStore:
    """Serves a store for the workers of one formation on a free port while the object lives.

    Args:
        address: this host's address for all workers. An IP address is the only one served.
    """
    return TCPStore(
        "localhost" if (taken := listening_fd(address)) is None else address,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=taken,
    )


def run_workers(
    command: Sequence[str],
    source: RoundSource,
    process_count: int,
    *,
    restart: bool,
    output: OutputRules,
    host: str = "",
    verbose: bool,
) -> WorkerFailure | None:
    """Starts this host's workers, formation after formation, and waits for them.

    Args:
        command: program and arguments of each worker.
        source: source of formations.
        process_count: estimate for the first formation.
        restart: ask for another formation when a worker fails; else the failure ends all.
        output: how the ranks' output is written.
        host: name of this host in the output; empty: the job has no other.
        verbose: show the agent's log.

    Returns:
        The first failure, or None if all workers succeeded.

    Raises:
        JobEnded: this host is no longer part of the job.
        Stopped: a signal stopped this process.
        InvalidUsage: the first host cannot be reached from here.
    """
    if not verbose:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous, ranks = _Rendezvous(source), RankOutput(output, host)
    program, *arguments = kill_with_parent(command)
    # Without logs_specs it makes a folder for logs, which would remain.
    config = LaunchConfig(1, 1, process_count, logs_specs=_RankPipes(ranks))
    # PyTorch 2.9 and newer bind workers to the NUMA nodes of their GPUs.
    numa: dict[str, Any] = {}
    if hasattr(config, "numa_options"):
        numa["numa_options"] = config.numa_options
    spec = WorkerSpec(
        role="worker",
        local_world_size=process_count,
        rdzv_handler=rendezvous,
        entrypoint=program,
        # The agent would expand "$name" in them as its macros.
        args=tuple(argument.replace("$", "$$") for argument in arguments),
        max_restarts=_NOT_LIMITED if restart else 0,
        **numa,
    )
    rendezvous.spec = spec
    agent = _Agent(spec, source, rendezvous, ranks)
    try:
        with _handlers_kept():
            result = agent.run()
    except SignalException as error:
        ranks.finish(stopped=True)
        raise Stopped(int(error.sigval)) from None
    finally:
        ranks.finish()
    if not result.is_failed():
        return None
    return rendezvous.failure


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restores the signal handlers that torch's agent replaces."""
    before = {number: signal.getsignal(number) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not a Python handler
                signal.signal(number, handler)


class _Rendezvous(RendezvousHandler):
    """torch's view of the formations."""

    def __init__(self, source: RoundSource) -> None:
        self.spec: WorkerSpec | None = None
        self.formation: Formation | None = None
        self.failure: WorkerFailure | None = None
        self._source = source
        self._threads_given = "OMP_NUM_THREADS" in os.environ

    def next_rendezvous(self) -> RendezvousInfo:
        before = 0 if self.formation is None else self.formation.number
        now = self._source.next_formation(before, self.failure)
        self.formation, self.failure = now, None
        self._reach(now)
        assert self.spec is not None
        self.spec.local_world_size = now.process_count
        if not self._threads_given:
            threads = max(1, (os.cpu_count() or 1) // now.process_count)
            os.environ["OMP_NUM_THREADS"] = str(threads)
        if now.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(number) for number in now.devices)
        # Agents exchange nothing, so each has its own store.
        place = RendezvousStoreInfo(now.address, now.port)
        return RendezvousInfo(HashStore(), now.place, now.host_count, place)

    def _reach(self, now: Formation) -> None:
        """Checks that the workers' store is reachable; workers themselves would wait far longer.

        Raises:
            InvalidUsage: the store is unreachable, and no other formation has been announced.
        """
        deadline = time.monotonic() + _REACH_S
        while True:
            try:
                socket.create_connection((now.address, now.port), _REACH_S).close()
                return
            except OSError as error:
                if self._source.newest() > now.number:
                    return  # the job forms without that host; torch soon asks for the next one
                if time.monotonic() > deadline:
                    raise InvalidUsage(
                        f"{socket.gethostname()} cannot reach the first host at {now.address}, "
                        f"port {now.port} ({error}); hosts must reach each other on all ports: "
                        "look for a firewall, or name the network with --network-interface"
                    ) from None
            time.sleep(0.2)

    def num_nodes_waiting(self) -> int:
        number = 0 if self.formation is None else self.formation.number
        return int(self._source.newest() > number)  # makes torch ask for the next formation

    @property
    def use_agent_store(self) -> bool:
        return True  # the formation's store exists before any worker

    def get_backend(self) -> str:
        return "hvd_order"

    def get_run_id(self) -> str:
        # Equal on all hosts, since ranks compare it.
        now = self.formation
        return "none" if now is None else f"{now.address}:{now.port}"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):
    """Uses the formation's numbers where torch's agents communicate; records the first failure."""

    def __init__(
        self, spec: WorkerSpec, source: RoundSource, rendezvous: _Rendezvous, output: RankOutput
    ) -> None:
        super().__init__(spec, _RankPipes(output))
        self._output = output
        self._source = source
        self._rendezvous_handler = rendezvous
        self._stopping = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        now = self._rendezvous_handler.formation
        assert now is not None
        # Workers are told the number of restarts, and meet under it: it must be the same on all
        # hosts, whenever they joined.
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - (now.number - 1))
        before = {number: signal.getsignal(number) for number in _STOPS}
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._output.begin()
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, self._stop)  # in place of torch's
        return started

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Makes torch end the workers gracefully; a second signal ends them at once."""
        if not self._stopping:
            self._stopping = True
            name = signal.Signals(number)
            raise SignalException(f"process {os.getpid()} got {name.name}", sigval=name)
        if isinstance(self._pcontext, SubprocessContext):
            for handler in self._pcontext.subprocess_handlers.values():
                kill_with_children(handler.proc)

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        now = self._rendezvous_handler.formation
        assert now is not None
        return [
            Worker(
                local_rank=local_rank,
                global_rank=now.first_rank + local_rank,
                role_rank=now.first_rank + local_rank,
                world_size=now.size,
                role_world_size=now.size,
            )
            for local_rank in range(now.process_count)
        ]

    def _monitor_workers(self, worker_group: WorkerGroup) -> Any:
        failed = self._failed()
        result = super()._monitor_workers(worker_group)
        if result.failures:
            # The result also lists those that the agent has stopped since.
            ends = [(rank, one.exitcode) for rank, one in result.failures.items()]
            ends = [(rank, code) for rank, code in ends if rank in failed] or ends[:1]
            ends.sort(key=lambda end: end[1] == 1)  # a rank that lost another one has this code
            self._rendezvous_handler.failure = WorkerFailure(*ends[0], ends[1:])
        if result.state == WorkerState.SUCCEEDED and not self._source.finished():
            return RunResult(WorkerState.HEALTHY)  # makes torch ask for the next formation
        return result

    def _failed(self) -> set[int]:
        """Ranks that have failed; waits a moment for others that fail with them."""
        now = self._rendezvous_handler.formation
        if not isinstance(self._pcontext, SubprocessContext) or now is None:
            return set()
        processes = {n: each.proc for n, each in self._pcontext.subprocess_handlers.items()}
        deadline = time.monotonic() + _FAIL_TOGETHER_S
        while any(p.poll() for p in processes.values()) and time.monotonic() < deadline:
            if all(p.poll() is not None for p in processes.values()):
                break
            time.sleep(0.02)
        return {now.first_rank + n for n, p in processes.items() if p.poll()}

    def _exit_barrier(self) -> None:
        """Does nothing: `_monitor_workers` has waited for the other hosts, without a timeout."""


class _RankPipes(LogsSpecs):
    """Gives each rank pipes for its output; see `RankOutput`."""

    def __init__(self, output: RankOutput) -> None:
        super().__init__()
        self._output = output

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._output.finish()  # of the ranks before
        outs, errors = {}, {}
        for local_rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = ""  # the output has the error
            if "PYTHONUNBUFFERED" not in os.environ:
                env["PYTHONUNBUFFERED"] = "1"  # lines come when they are printed, as on a terminal
            rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
            outs[local_rank] = self._output.open(rank, size, STDOUT)
            errors[local_rank] = self._output.open(rank, size, STDERR)
        return LogsDest(outs, errors, {}, {}, dict.fromkeys(envs, os.devnull))
