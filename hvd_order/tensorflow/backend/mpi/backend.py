"""The functions of `hvd_order.tensorflow.backend.interface.Backend`, over MPI."""

from __future__ import annotations

import atexit
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mpi4py import MPI

from hvd_order._native import _core as native
from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage, NotInitialized
from hvd_order.base.same_model import check_same_settings
from hvd_order.tensorflow.backend.interface import Collective, Gradient, GradientModel, HostTensor
from hvd_order.tensorflow.backend.mpi import collectives
from hvd_order.tensorflow.backend.mpi.arrays import array_of, host_tensor_of
from hvd_order.tensorflow.backend.mpi.engine import SetEngine
from hvd_order.tensorflow.backend.mpi.members import Members
from hvd_order.tensorflow.backend.mpi.mover import Mover

__all__: list[str] = []


class _Set:
    """A process set: its communicators, a thread for collectives, and an engine made on demand."""

    def __init__(self, number: int, members: Members) -> None:
        self.number = number
        self.members = members
        self.objects = members.another("process set")
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="hvd_order collective")
        self.engine: SetEngine | None = None


class _Job:
    """State of the job from `init` to `shutdown`."""

    def __init__(self, config: Config, world: Members) -> None:
        self.config = config
        self.world = world
        settings = world.gather(config.common_settings(), "init()")
        check_same_settings(dict(enumerate(settings)))
        names = world.gather(socket.gethostname(), "init()")
        same_host = [rank for rank, name in enumerate(names) if name == names[world.rank]]
        self.local_rank, self.local_size = same_host.index(world.rank), len(same_host)
        hosts = list(dict.fromkeys(names))
        places = Counter[str]()
        peers = []  # hosts with a process of this local rank
        for name in names:
            if places[name] == self.local_rank:
                peers.append(name)
            places[name] += 1
        peers.sort(key=hosts.index)
        self.cross_rank, self.cross_size = peers.index(names[world.rank]), len(peers)
        self.mover = Mover()
        self.sets = {0: _Set(0, world.another("init()"))}
        self.next_set = 1
        self.callbacks: list[Callable[[], None]] = []

    def engine_of(self, number: int) -> SetEngine:
        """The engine of a set; the first call makes it and is collective among the members."""
        one = _set(number)
        if one.engine is None:
            one.engine = SetEngine(one.objects, self.mover, self.config)
        return one.engine


class _JobHolder:
    """Holds the job of this process.

    Attributes:
        lock: lets init() and shutdown() run one at a time.
        ends_with_program: the end of the program shuts down, whichever job there is then.
    """

    def __init__(self) -> None:
        self.job: _Job | None = None
        self.lock = threading.Lock()
        self.ends_with_program = False


_holder = _JobHolder()


def _current() -> _Job:
    job = _holder.job
    if job is None:
        raise NotInitialized("Horovod has not been initialized; use hvd.init().")
    return job


def _set(number: int) -> _Set:
    found = _current().sets.get(number)
    if found is None:
        raise InvalidUsage(
            f"process set {number} is not registered (any more); pass it to hvd.init() or "
            "hvd.add_process_set()"
        )
    return found


# ---- the process ----


def init(comm: object = None) -> None:
    """Joins the processes that mpirun started; without mpirun, a job of one process."""
    if comm not in (None, []):
        raise InvalidUsage("init(comm=...) is not supported: all processes take part")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise InvalidUsage(
            "this MPI does not let several threads use it (MPI_THREAD_MULTIPLE); build it so, or "
            "install PyTorch, which carries the bytes then: pip install torch"
        )
    with _holder.lock:
        if _holder.job is None:
            config = Config.from_environment()
            size = MPI.COMM_WORLD.Get_size()
            timeout_s = config.timeout.total_seconds()
            everybody = Members(MPI.COMM_WORLD, list(range(size)), timeout_s)
            _holder.job = _Job(config, everybody.another("init()"))
            if not _holder.ends_with_program:
                _holder.ends_with_program = True
                atexit.register(shutdown)  # before MPI ends, after which no thread may use it


def shutdown() -> None:
    """Leaves the job; MPI itself ends with the process."""
    with _holder.lock:
        job = _holder.job
        if job is None:
            return
        try:
            while job.callbacks:
                job.callbacks.pop()()
            for one in job.sets.values():
                if one.engine is not None:
                    one.engine.close()
                one.thread.shutdown(wait=False, cancel_futures=True)
        finally:
            job.mover.stop()
            _holder.job = None


def config() -> Config:
    """The settings that `init` has read."""
    return _current().config


def on_shutdown(callback: Callable[[], None]) -> None:
    """Registers `callback` to run before the processes disconnect."""
    _current().callbacks.append(callback)


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return _holder.job is not None


def rank() -> int:
    """Rank of this process."""
    return _current().world.rank


def size() -> int:
    """Number of processes of the job."""
    return _current().world.size


def local_rank() -> int:
    """Number of this process among those of its host."""
    return _current().local_rank


def local_size() -> int:
    """Number of processes of the job on this host."""
    return _current().local_size


def cross_rank() -> int:
    """Number of this host among the hosts that have a process of this local rank."""
    return _current().cross_rank


def cross_size() -> int:
    """Number of hosts that have a process of this local rank."""
    return _current().cross_size


def supports(what: str) -> int:
    """Supports MPI only."""
    return int(what in ("mpi_built", "mpi_enabled", "mpi_threads_supported"))


def start_timeline(path: str, mark_cycles: bool) -> Any:
    """Not supported over MPI."""
    raise InvalidUsage("timelines need PyTorch so far: pip install torch")


def stop_timeline() -> Any:
    """Does nothing: there is no timeline over MPI."""


# ---- process sets ----


def add_process_set(ranks: Sequence[int]) -> int:
    """Registers a process set on all ranks of the job and returns its number."""
    job = _current()
    everyone = job.sets[0].objects.gather(list(ranks), "add_process_set()")
    if any(each != everyone[0] for each in everyone):
        raise InvalidUsage(f"the ranks add different process sets: {everyone}")
    number, job.next_set = job.next_set, job.next_set + 1
    if job.world.rank in ranks:
        group = job.world.comm.Get_group().Incl(list(ranks))
        comm = job.world.comm.Create_group(group, tag=number)
        timeout_s = job.config.timeout.total_seconds()
        job.sets[number] = _Set(number, Members(comm, list(ranks), timeout_s))
    return number


def remove_process_set(number: int) -> bool:
    """Removes a process set on all ranks of the job."""
    job = _current()
    job.sets[0].objects.gather(number, "remove_process_set()")
    if number == 0 or number >= job.next_set:
        return False
    found = job.sets.pop(number, None)
    if found is not None:
        if found.engine is not None:
            found.engine.close()
        found.thread.shutdown(wait=False, cancel_futures=True)
    return True


# ---- collectives ----


def start(collective: Collective, tensors: Sequence[HostTensor]) -> Callable[[], list[HostTensor]]:
    """Queues a collective; the returned function waits for it."""
    one = _set(collective.process_set)
    arrays = [array_of(tensor) for tensor in tensors]
    future: Future[list[Any]] = one.thread.submit(
        collectives.carry_out, one.members, collective, arrays
    )

    def finish() -> list[HostTensor]:
        return [host_tensor_of(result) for result in future.result()]

    return finish


def join() -> int:
    """Not supported over MPI."""
    raise NotImplementedError("join() over MPI; install PyTorch: pip install torch")


def broadcast_object(obj: Any, root_rank: int, name: str | None, number: int) -> Any:
    """Broadcasts the object of a rank to every rank of a process set."""
    objects = _set(number).objects
    what = f"broadcast_object {name or ''}".rstrip()
    return objects.broadcast(obj, objects.ranks.index(root_rank), what)


def allgather_object(obj: Any, name: str | None, number: int) -> list[Any]:
    """Gathers the objects of all ranks."""
    return _set(number).objects.gather(obj, f"allgather_object {name or ''}".rstrip())


# ---- gradients ----


def engine_api() -> int:
    """Address of the engine's function table for operators."""
    return native.engine_api()


def register(gradients: Sequence[Gradient], order: Sequence[int], number: int) -> GradientModel:
    """Registers gradients on all ranks of a process set of several."""
    return _current().engine_of(number).register(gradients, order)
