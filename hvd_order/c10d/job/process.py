"""This process among the others: ``init``, ``shutdown`` and who is where.

``init()`` joins the process group that the program has already made with ``torch.distributed``,
or makes groups of its own, which torch.distributed does not list (process_groups.py), from what the
launcher left in the environment (`hvd_order.launch.environment`). A job of one process needs no
process group at all.
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
    """What ``init()`` found out and made; `current` returns it.

    Attributes:
        rank, size: this process among all.
        local_rank, local_size: this process among those of its host.
        cross_rank, cross_size: this host among those that have a process of this local rank.
        config: the knobs, read from the environment once.
        backend: what new groups use, in torch.distributed's spelling; empty when size is 1.
        abandoned: the process ends by an error, so `close` finishes nothing and waits for nobody.
        roll_call: asks who lives; None until the ranks exchange messages.

    Thread safety: the fields never change; the methods belong to the thread that called ``init()``.
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
        """A process group with connections of its own; destroyed at shutdown.

        Collective: every rank must call it, in the same order.

        Args:
            purpose: one word for logs.
            backend: in torch.distributed's spelling; None: `backend`.
            timeout: longest transfer; None: the config's.
            ranks: the members; None: all ranks.

        Returns:
            The group; on a rank that is no member, something of no use.

        Raises:
            InvalidUsage: in a job of one process.
            HorovodInternalError: a rank did not come, or cannot be reached.
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
        """The groups made here, and that of all ranks."""
        everybody = [dist.group.WORLD] if dist.is_initialized() else []
        return [*self._groups, *(group for group in everybody if group is not None)]

    def drop_group(self, group: dist.ProcessGroup) -> None:
        """Destroys a group before the shutdown."""
        if group in self._groups and self._maker is not None:
            self._groups.remove(group)
            self._maker.end(group)

    @property
    def functions_group(self) -> dist.ProcessGroup:
        """The group that allreduce(), broadcast() and their like use.

        Raises:
            InvalidUsage: in a job of one process.
        """
        if self._functions_group is None:
            raise InvalidUsage("a job of one process has no process groups")
        return self._functions_group

    @property
    def messages_group(self) -> dist.ProcessGroup:
        """The group over which ranks agree on what the functions do next.

        Raises:
            InvalidUsage: in a job of one process.
        """
        if self._messages_group is None:
            raise InvalidUsage("a job of one process has no process groups")
        return self._messages_group

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the rank: it has none of its threads."""
        return self._pid != os.getpid()

    def check_not_forked(self, what: str) -> None:
        """Raises InvalidUsage in a child of the rank."""
        if self.is_forked:
            raise InvalidUsage(
                f"{what} in process {os.getpid()}, which was forked from rank {self.rank} "
                f"(process {self._pid}) and takes no part in the job; call it there"
            )

    def on_shutdown(self, callback: Callable[[], None]) -> None:
        """Has `callback` run at shutdown or at exit, the last registered first."""
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


_GREETING_S = 2.0  # torch tries to connect for the timeout; then it waits for a word, for ever

_lock = threading.Lock()  # guards the two names below; held by init() while it waits for others
_context: ProcessContext | None = None
_init_count = 0  # keeps the keys of one init() apart from those of the next in the same store
_at_init: list[Callable[[], None]] = []
_stores: dict[tuple[str, int], TCPStore] = {}  # kept: rank 0's is the server of all


def init(comm: object = None) -> None:
    """Joins the other processes; process_sets.init() is the public form, and says the rest."""
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
            # A process that multiprocessing has forked ends without atexit.
            multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)
    for callback in _at_init:
        callback()


def at_init(callback: Callable[[], None]) -> None:
    """Has `callback` run at the end of every ``init()`` to come."""
    _at_init.append(callback)


def shutdown() -> None:
    """Leaves the job; ``init()`` may be called again. Without ``init()`` it does nothing.

    First of all it finishes outstanding updates, and waits until no other rank needs this one for
    theirs. Afterwards parameters are as if ``step()`` had never put anything off. Ends only what
    ``init()`` made: a process group of the program itself stays.

    Raises:
        HorovodInternalError: an outstanding update could not be finished.
    """
    _shutdown()


def _shutdown(abandoned: bool = False) -> None:
    global _context
    context = _context
    if context is not None and context.is_forked:
        _context = None  # the job is the parent's
        return
    with _lock:
        context, _context = _context, None
    if context is not None:
        context.abandoned = abandoned
        context.close()


def is_initialized() -> bool:
    """Whether ``init()`` was called, and ``shutdown()`` not since."""
    return _context is not None


def current() -> ProcessContext:
    """The context that ``init()`` made.

    Raises:
        NotInitialized: ``init()`` was not called.
    """
    context = _context
    if context is None:
        raise NotInitialized("Horovod has not been initialized; use hvd.init().")
    return context


def rank() -> int:
    """This process's number, from 0 to ``size() - 1``."""
    return current().rank


def size() -> int:
    """How many processes the job has."""
    return current().size


def local_rank() -> int:
    """This process's number among those of its host."""
    return current().local_rank


def local_size() -> int:
    """How many processes of the job this host has."""
    return current().local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a process of this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """How many hosts have a process of this local rank."""
    return current().cross_size


def mpi_threads_supported() -> bool:
    """Whether MPI may be used beside; as in Horovod an error where MPI is not in use.

    Raises:
        InvalidUsage: MPI is not in use.
    """
    if not mpi_enabled():
        raise InvalidUsage("Horovod MPI is not enabled; this job does not communicate over MPI.")
    return True  # torch.distributed's MPI back end asks for MPI_THREAD_SERIALIZED or more


def mpi_enabled() -> bool:
    """Whether this job communicates over MPI."""
    return _context is not None and "mpi" in _context.backend


def mpi_built() -> bool:
    """Whether this PyTorch has the MPI back end."""
    return bool(dist.is_mpi_available())


def gloo_enabled() -> bool:
    """Whether Gloo can be used; always so unless the job communicates over MPI."""
    return gloo_built() and not mpi_enabled()


def gloo_built() -> bool:
    """Whether this PyTorch has the Gloo back end."""
    return bool(dist.is_gloo_available())


def nccl_built() -> int:
    """NCCL's version as one number (2.21.5 is 22105), 0 where this PyTorch has no NCCL."""
    if not dist.is_nccl_available():
        return 0
    version = torch.cuda.nccl.version()
    major, minor, patch = (*version, 0, 0)[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """False: IBM's DDL does not exist for torch.distributed."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether this PyTorch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch was built for ROCm."""
    return torch.version.hip is not None


def _alone(config: Config) -> ProcessContext:
    return ProcessContext(0, 1, Placement(0, 1, 0, 1), config, backend="", maker=None)


def _join(config: Config) -> ProcessContext:
    """Takes part in the job that the program initialised itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return _alone(config)
    cards: list[Card | None] = [None] * size
    # The group has its own idea of the job.
    dist.all_gather_object(cards, Card.of_this_process(size, config, job=""))
    known = [card for card in cards if card is not None]
    check_cards(dict(enumerate(known)))
    place = placement([card.host for card in known], rank)
    backend = _covering_backend(str(dist.get_backend_config()), every_rank_has_a_device(known))
    return ProcessContext(rank, size, place, config, backend, JoinedGroups())


def _covering_backend(backend: str, devices: bool) -> str:
    """`backend` of the program's own group, completed so that CPU and CUDA tensors both work."""
    parts = backend.split(",")
    covered = {part.split(":")[0] for part in parts}
    if "cpu" not in covered and dist.is_gloo_available():
        parts.append("cpu:gloo")
    if "cuda" not in covered and devices and dist.is_nccl_available():
        parts.append("cuda:nccl")
    return ",".join(parts)


def _start(info: RankInfo, config: Config, generation: int) -> ProcessContext:
    """Makes the job of all ranks that the launcher started."""
    store = _store(info, config, generation)
    cards = meet(store, info, config)
    place = placement([card.host for card in cards], info.rank)
    # A launcher knows better than host names, which containers may share or change.
    if info.local_rank is not None and info.local_size is not None:
        place = Placement(info.local_rank, info.local_size, place.cross_rank, place.cross_size)
    if info.cross_rank is not None and info.cross_size is not None:
        place = Placement(place.local_rank, place.local_size, info.cross_rank, info.cross_size)
    nccl = dist.is_nccl_available() and every_rank_has_a_device(cards)
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    maker = OwnGroups(store, info.rank, info.size)
    return ProcessContext(info.rank, info.size, place, config, backend, maker)


def _store(info: RankInfo, config: Config, generation: int) -> Store:
    """The key-value store of the job, with keys of its own for each init()."""
    address = (info.master_addr, info.master_port)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    agent_serves = (
        info.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    store = _stores.get(address)
    if store is None:
        serves = info.rank == 0 and not agent_serves
        # At the loopback address alone if that is where the others come.
        own = serves and is_loopback(info.master_addr)

        def connect() -> TCPStore:
            return TCPStore(
                info.master_addr,
                info.master_port,
                info.size,
                is_master=serves,
                timeout=config.timeout,
                wait_for_workers=False,
                multi_tenant=True,  # as torch.distributed itself: the program may use it as well
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
    """The program ends: by itself, or by an error that it has not caught."""
    _shutdown(abandoned=_ends_by_error())


def _ends_by_error() -> bool:
    """Whether others would wait in vain for what this rank was about to do.

    ``sys.exit()`` and Ctrl-C are ends that the program, or its user, has chosen.
    """
    # The first in multiprocessing's processes, where the error is under way; the other where the
    # interpreter has reported it.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt))


atexit.register(_at_exit)
