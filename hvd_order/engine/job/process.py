"""This process in the job: ``init``, ``shutdown``, and ranks and sizes.

``init()`` joins the process group that the program has already made with ``torch.distributed``.
Otherwise it makes groups of its own, which torch.distributed does not list (process_groups.py),
from the launcher's environment variables (`hvd_order.launch.environment`). A job of one process
needs no process group.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing.util
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from hvd_order.base import log
from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.job.job import current, holder, is_initialized
from hvd_order.engine.job.start_job import new_job

__all__ = [
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

_at_init: list[Callable[[], None]] = []  # registered by modules when they are imported


def init(comm: object = None) -> None:
    """Joins the job; process_sets.init() is the public form and has the full description."""
    if comm is not None and comm != []:
        raise InvalidUsage(
            f"init(comm={comm!r}) is not supported: all processes that the launcher started take "
            "part; call init() without comm, or start fewer processes"
        )
    with holder.lock:
        if is_initialized():
            return
        config = Config.from_environment()
        log.begin(config.log)
        job = new_job(config)
        log.set_rank(job.rank)
        holder.begin(job)
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
    has_threads = is_initialized() and not current().is_forked
    try:
        _shutdown()
    finally:
        if has_threads:  # else native objects of the parent's jobs would wait for those of theirs
            # The objects of a job refer to each other, and its process groups end with them. Their
            # threads and connections, one to each rank, would stay until Python's next full
            # collection, and a job that starts again and again would run out of descriptors.
            gc.collect()


def _shutdown(abandoned: bool = False) -> None:
    if is_initialized() and current().is_forked:
        holder.leave_to_parent(current())  # the job belongs to the parent
        return
    with holder.lock:
        if not is_initialized():
            return
        job = current()
        job.is_open = False  # for this process, the job has ended
    job.abandoned = abandoned
    try:
        job.close()
    finally:
        holder.end(job)


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
    return is_initialized() and "mpi" in current().backend


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
