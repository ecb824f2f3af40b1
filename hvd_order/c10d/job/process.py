"""This process in the job: ``init``, ``shutdown``, and ranks and sizes.

``init()`` joins the process group that the program has already made with ``torch.distributed``.
Otherwise it makes groups of its own, which torch.distributed does not list (process_groups.py),
from the launcher's environment variables (`hvd_order.launch.environment`). A job of one process
needs no process group.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hvd_order import _torch as native
from hvd_order.bounded import within
from hvd_order.c10d.job.meeting import Card, check_cards, every_rank_has_a_device, meet
from hvd_order.c10d.job.process_groups import Groups, JoinedGroups, OwnGroups
from hvd_order.c10d.job.roll_call import RollCall
from hvd_order.config import Config
from hvd_order.errors import InvalidUsage, NotInitialized, TransferTimeout
from hvd_order.launch.environment import Placement, RankInfo, placement, rank_info
from hvd_order.launch.listening import is_loopback, listening_fd
from hvd_order.server.access.store_errors import first_line

__all__ = [
    "ProcessContext",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "current",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]


class ProcessContext:
    """State that ``init()`` creates; `current` returns it.

    Attributes:
        rank, size: this process's number among all processes, and their count.
        local_rank, local_size: this process's number on its host, and the host's process count.
        cross_rank, cross_size: this host's number among the hosts that have a process of this
            local rank, and their count.
        config: the knobs, read from the environment once.
        backend: backend of new groups, in torch.distributed's spelling; empty when size is 1.
        abandoned: the process ends by an error, so `close` applies no updates and waits for no
            rank.
        roll_call: asks which ranks are alive; None until the ranks exchange messages.

    Thread safety: the fields never change; the methods belong to the thread that called
    ``init()``.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        place: Placement,
        config: Config,
        backend: str,
        maker: Groups | None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.cross_rank = place.cross_rank
        self.cross_size = place.cross_size
        self.config = config
        self.backend = backend
        self.abandoned = False
        self.roll_call: RollCall | None = None
        self._pid = os.getpid()
        self._maker = maker
        self._groups: list[dist.ProcessGroup] = []
        self._callbacks: list[Callable[[], None]] = []
        self._functions_group = self.new_group("functions") if size > 1 else None
        self._messages_group = self.new_group("messages", backend="gloo") if size > 1 else None

    def new_group(
        self,
        purpose: str,
        backend: str | None = None,
        timeout: timedelta | None = None,
        ranks: list[int] | None = None,
    ) -> dist.ProcessGroup:
        """Makes a process group with connections of its own; destroyed at shutdown.

        Collective: every rank must call it, in the same order.

        Args:
            purpose: one word for logs.
            backend: in torch.distributed's spelling; None: `backend`.
            timeout: longest transfer; None: the timeout of the configuration.
            ranks: the members; None: all ranks.

        Returns:
            The group; on a rank that is not a member, an unusable object.

        Raises:
            InvalidUsage: in a job of one process.
            HorovodInternalError: a rank did not arrive, or cannot be reached.
        """
        if self._maker is None:
            raise InvalidUsage("a job of one process has no process groups")
        group = self._maker.make(
            purpose,
            backend or self.backend,
            self.config.timeout if timeout is None else timeout,
            ranks,
        )
        if ranks is None or self.rank in ranks:
            self._groups.append(group)
            native.watch_group(group)
        return group

    def open_groups(self) -> list[dist.ProcessGroup]:
        """Returns the groups made here, and torch.distributed's default group."""
        everybody = [dist.group.WORLD] if dist.is_initialized() else []
        return [*self._groups, *(group for group in everybody if group is not None)]

    def drop_group(self, group: dist.ProcessGroup) -> None:
        """Destroys a group before the shutdown."""
        if group in self._groups and self._maker is not None:
            self._groups.remove(group)
            self._maker.end(group)

    @property
    def functions_group(self) -> dist.ProcessGroup:
        """The group for allreduce(), broadcast() and similar functions.

        Raises:
            InvalidUsage: in a job of one process.
        """
        if self._functions_group is None:
            raise InvalidUsage("a job of one process has no process groups")
        return self._functions_group

    @property
    def messages_group(self) -> dist.ProcessGroup:
        """The group over which ranks agree on the next collective.

        Raises:
            InvalidUsage: in a job of one process.
        """
        if self._messages_group is None:
            raise InvalidUsage("a job of one process has no process groups")
        return self._messages_group

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the rank, without the rank's threads."""
        return self._pid != os.getpid()

    def check_not_forked(self, what: str) -> None:
        """Raises InvalidUsage in a forked child of the rank."""
        if self.is_forked:
            raise InvalidUsage(
                f"{what} in process {os.getpid()}, which was forked from rank {self.rank} "
                f"(process {self._pid}) and takes no part in the job; call it there"
            )

    def on_shutdown(self, callback: Callable[[], None]) -> None:
        """Runs `callback` at shutdown or at exit, the last registered first."""
        self._callbacks.append(callback)

    def close(self) -> None:
        """Runs the callbacks and destroys the groups made here; a second call does nothing.

        Raises:
            Exception: the first error of a callback, after all have run.
        """
        first_error: Exception | None = None
        while self._callbacks:
            try:
                self._callbacks.pop()()
            except Exception as error:
                first_error = first_error or error
        self._functions_group = self._messages_group = None
        while self._groups:
            self.drop_group(self._groups[-1])
        if first_error is not None:
            raise first_error


_GREETING_S = 2.0  # torch limits the connection attempt, but not the wait for a reply

_lock = threading.Lock()  # guards the two names below; init() holds it while it waits for ranks
_context: ProcessContext | None = None
_init_count = 0  # separates the keys of successive init() calls in one store
_at_init: list[Callable[[], None]] = []
_stores: dict[tuple[str, int], TCPStore] = {}  # kept alive: rank 0's is the server


def init(comm: object = None) -> None:
    """Joins the job; process_sets.init() is the public form and has the full description."""
    global _context, _init_count
    if comm is not None and comm != []:
        raise InvalidUsage(
            f"init(comm={comm!r}) is not supported: all processes that the launcher started take "
            "part; call init() without comm, or start fewer processes"
        )
    with _lock:
        if _context is not None:
            return
        config = Config.from_environment()
        if dist.is_initialized():
            context = _join(config)
        else:
            info = rank_info(os.environ)
            context = _alone(config) if info.size == 1 else _start(info, config, _init_count)
        _init_count += 1
        _context = context
        if multiprocessing.parent_process() is not None:
            # A process forked by multiprocessing ends without atexit.
            multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)
    for callback in _at_init:
        callback()


def at_init(callback: Callable[[], None]) -> None:
    """Runs `callback` at the end of every future ``init()``."""
    _at_init.append(callback)


def shutdown() -> None:
    """Leaves the job; ``init()`` may be called again. Without ``init()`` it does nothing.

    First applies deferred updates, and waits until no other rank needs this one for its own.
    Afterwards parameters are as if ``step()`` had never deferred an update. Ends only what
    ``init()`` made: a process group of the program itself stays.

    Raises:
        HorovodInternalError: a deferred update could not be applied.
    """
    _shutdown()


def _shutdown(abandoned: bool = False) -> None:
    global _context
    context = _context
    if context is not None and context.is_forked:
        _context = None  # the job belongs to the parent
        return
    with _lock:
        context, _context = _context, None
    if context is not None:
        context.abandoned = abandoned
        context.close()


def is_initialized() -> bool:
    """Returns whether ``init()`` was called without a later ``shutdown()``."""
    return _context is not None


def current() -> ProcessContext:
    """Returns the context that ``init()`` made.

    Raises:
        NotInitialized: ``init()`` was not called.
    """
    context = _context
    if context is None:
        raise NotInitialized("Horovod has not been initialized; use hvd.init().")
    return context


def rank() -> int:
    """Returns this process's number, from 0 to ``size() - 1``."""
    return current().rank


def size() -> int:
    """Returns the number of processes of the job."""
    return current().size


def local_rank() -> int:
    """Returns this process's number among those of its host."""
    return current().local_rank


def local_size() -> int:
    """Returns the number of processes of the job on this host."""
    return current().local_size


def cross_rank() -> int:
    """Returns this host's number among the hosts that have a process of this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have a process of this local rank."""
    return current().cross_size


def mpi_threads_supported() -> bool:
    """Returns whether the program may use MPI as well, with threads.

    Raises:
        InvalidUsage: MPI is not in use, as in Horovod.
    """
    if not mpi_enabled():
        raise InvalidUsage("Horovod MPI is not enabled; this job does not communicate over MPI.")
    return True  # torch.distributed's MPI backend requests MPI_THREAD_SERIALIZED or more


def mpi_enabled() -> bool:
    """Returns whether this job communicates over MPI."""
    return _context is not None and "mpi" in _context.backend


def mpi_built() -> bool:
    """Returns whether this PyTorch has the MPI backend."""
    return bool(dist.is_mpi_available())


def gloo_enabled() -> bool:
    """Returns whether Gloo can be used; it can unless the job communicates over MPI."""
    return gloo_built() and not mpi_enabled()


def gloo_built() -> bool:
    """Returns whether this PyTorch has the Gloo backend."""
    return bool(dist.is_gloo_available())


def nccl_built() -> int:
    """Returns NCCL's version as one number (2.21.5 is 22105), 0 if this PyTorch has no NCCL."""
    if not dist.is_nccl_available():
        return 0
    version = torch.cuda.nccl.version()
    major, minor, patch = (*version, 0, 0)[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """Returns False: IBM's DDL does not exist for torch.distributed."""
    return False


def ccl_built() -> bool:
    """Returns False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Returns whether this PyTorch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Returns whether this PyTorch was built for ROCm."""
    return torch.version.hip is not None


def _alone(config: Config) -> ProcessContext:
    return ProcessContext(0, 1, Placement(0, 1, 0, 1), config, backend="", maker=None)


def _join(config: Config) -> ProcessContext:
    """Joins the job that the program initialised itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return _alone(config)
    cards: list[Card | None] = [None] * size
    # The group replaces the launcher's name of the job.
    dist.all_gather_object(cards, Card.of_this_process(size, config, job=""))
    known = [card for card in cards if card is not None]
    check_cards(dict(enumerate(known)))
    place = placement([card.host for card in known], rank)
    backend = _covering_backend(str(dist.get_backend_config()), every_rank_has_a_device(known))
    return ProcessContext(rank, size, place, config, backend, JoinedGroups())


def _covering_backend(backend: str, devices: bool) -> str:
    """Completes the backend of the program's own group so that CPU and CUDA tensors both work."""
    parts = backend.split(",")
    covered = {part.split(":")[0] for part in parts}
    if "cpu" not in covered and dist.is_gloo_available():
        parts.append("cpu:gloo")
    if "cuda" not in covered and devices and dist.is_nccl_available():
        parts.append("cuda:nccl")
    return ",".join(parts)


def _start(info: RankInfo, config: Config, generation: int) -> ProcessContext:
    """Creates the job of all ranks that the launcher started."""
    store = _store(info, config, generation)
    cards = meet(store, info, config)
    place = placement([card.host for card in cards], info.rank)
    # The launcher is more reliable than host names, which containers may share or change.
    if info.local_rank is not None and info.local_size is not None:
        place = Placement(info.local_rank, info.local_size, place.cross_rank, place.cross_size)
    if info.cross_rank is not None and info.cross_size is not None:
        place = Placement(place.local_rank, place.local_size, info.cross_rank, info.cross_size)
    nccl = dist.is_nccl_available() and every_rank_has_a_device(cards)
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    maker = OwnGroups(store, info.rank, info.size)
    return ProcessContext(info.rank, info.size, place, config, backend, maker)


def _store(info: RankInfo, config: Config, generation: int) -> Store:
    """Connects to the key-value store of the job, with separate keys for each init()."""
    address = (info.master_addr, info.master_port)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    agent_serves = (
        info.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    store = _stores.get(address)
    if store is None:
        serves = info.rank == 0 and not agent_serves
        # Listen at the loopback address alone if the other ranks connect there.
        own = serves and is_loopback(info.master_addr)

        def connect() -> TCPStore:
            return TCPStore(
                info.master_addr,
                info.master_port,
                info.size,
                is_master=serves,
                timeout=config.timeout,
                wait_for_workers=False,
                multi_tenant=True,  # as in torch.distributed: the program may use it too
                master_listen_fd=listening_fd(*address) if own else None,
            )

        try:
            store = within(config.timeout.total_seconds() + _GREETING_S, connect)
        except (TimeoutError, RuntimeError) as error:
            raise _unreachable(info, config, error) from error
        _stores[address] = store
    return PrefixStore(f"hvd_order/{restart}/{generation}", store)


def _unreachable(info: RankInfo, config: Config, error: Exception) -> Exception:
    where = f"{info.master_addr}:{info.master_port}"
    if info.rank == 0:
        return InvalidUsage(
            f"rank 0 cannot listen at {where} ({first_line(error)}); is another job using the "
            "port? Set MASTER_PORT to a free one on every rank"
        )
    return TransferTimeout(
        f"rank {info.rank} could not reach rank 0 at {where} within "
        f"{config.timeout.total_seconds():g} s ({first_line(error)}); did rank 0 start, or is "
        "it stopped, and is MASTER_ADDR its address?"
    )


def _at_exit() -> None:
    """Shuts down when the program ends, by itself or by an uncaught error."""
    _shutdown(abandoned=_ends_by_error())


def _ends_by_error() -> bool:
    """Returns whether other ranks would wait in vain for this rank's next collective.

    ``sys.exit()`` and Ctrl-C are ends that the program, or its user, has chosen.
    """
    # multiprocessing's processes end while the error is being handled; elsewhere the interpreter
    # has reported it already.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt))


atexit.register(_at_exit)
