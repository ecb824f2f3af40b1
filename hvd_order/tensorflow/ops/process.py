"""This process among the others: ``init``, ``shutdown`` and ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import tensorflow as tf

from hvd_order.base.errors import HvdOrderError, InvalidUsage
from hvd_order.tensorflow.backend import op_library
from hvd_order.tensorflow.backend.interface import backend, started_backend
from hvd_order.tensorflow.ops.call_order import refuse_in_data_functions
from hvd_order.tensorflow.ops.process_sets import ProcessSet, add_process_set, forget_all
from hvd_order.tensorflow.ops.requests import RequestServer

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "init",
    "is_homogeneous",
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
    "start_timeline",
    "stop_timeline",
]

_log = logging.getLogger("hvd_order")


class _Serving:
    """This framework's part of the job.

    Attributes:
        server: runs collectives of operators from init() to the shutdown, whichever framework's
            that is; None outside of a job.
    """

    def __init__(self) -> None:
        self.server: RequestServer | None = None


_serving = _Serving()
# Registered by modules when they are imported.
_before_shutdown: list[Callable[[], None]] = []
_at_end: list[Callable[[], None]] = []


def before_shutdown(callback: Callable[[], None]) -> None:
    """Registers `callback` to run at every `shutdown()`, before the other ranks disconnect."""
    _before_shutdown.append(callback)


def at_end(callback: Callable[[], None]) -> None:
    """Registers `callback` to run at every end of a job, after operators have been notified."""
    _at_end.append(callback)


def init(comm: object = None, process_sets: str | Sequence[ProcessSet] | None = None) -> None:
    """Joins the other processes; every rank must call it before anything else.

    A second call without a ``shutdown()`` in between does nothing, as in Horovod.

    Args:
        comm: only None (all processes).
        process_sets: sets to register, the same on every rank. "dynamic" is accepted: sets can
            always be added later.

    Raises:
        InvalidUsage: other arguments, a wrong knob, nothing that could carry bytes, or operators
            that do not fit this TensorFlow.
        TransferTimeout: not all ranks arrived within ``HVD_ORDER_TIMEOUT``; names those missing.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise InvalidUsage(f"process_sets is {process_sets!r}; expected a list or 'dynamic'")
    if is_initialized():
        return
    library = op_library.load()  # before other ranks wait for this rank
    refuse_in_data_functions()
    carries = backend()
    carries.init(comm)
    library.set_engine_api(carries.engine_api())
    _serving.server = RequestServer(library, carries)
    carries.on_shutdown(_end)
    for process_set in process_sets or [] if not isinstance(process_sets, str) else []:
        add_process_set(process_set)


def _end() -> None:
    """Ends all waits of operators with an error before the processes disconnect."""
    server, _serving.server = _serving.server, None
    if server is not None:
        server.stop()
    for callback in _at_end:
        callback()
    forget_all()


def shutdown() -> None:
    """Leaves the job; ``init()`` may be called again. Without ``init()`` it does nothing."""
    if not is_initialized():
        return
    try:
        for callback in _before_shutdown:
            callback()
    except HvdOrderError as error:
        _log.warning("the updates of the last step were not applied: %s", error)
    started_backend().shutdown()


def is_initialized() -> bool:
    """Whether ``init()`` was called, and ``shutdown()`` not since."""
    return _serving.server is not None


def rank() -> int:
    """Rank of this process, from 0 to ``size() - 1``."""
    return started_backend().rank()


def size() -> int:
    """Number of processes of the job."""
    return started_backend().size()


def local_rank() -> int:
    """This process's number among those of its host."""
    return started_backend().local_rank()


def local_size() -> int:
    """Number of processes of the job on this host."""
    return started_backend().local_size()


def cross_rank() -> int:
    """This host's number among the hosts that have a process of this local rank."""
    return started_backend().cross_rank()


def cross_size() -> int:
    """Number of hosts that have a process of this local rank."""
    return started_backend().cross_size()


def is_homogeneous() -> bool:
    """Whether all hosts have as many processes as this one."""
    return local_size() * cross_size() == size()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begins to record when slices travel; `stop_timeline` writes it on rank 0."""
    started_backend().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Writes the recorded timeline."""
    started_backend().stop_timeline()


def mpi_threads_supported() -> bool:
    """Whether MPI may be used beside; an error where MPI is not in use."""
    return bool(backend().supports("mpi_threads_supported"))


def mpi_enabled() -> bool:
    """Whether this job communicates over MPI."""
    return bool(backend().supports("mpi_enabled"))


def mpi_built() -> bool:
    """Whether the backend supports MPI."""
    return bool(backend().supports("mpi_built"))


def gloo_enabled() -> bool:
    """Whether Gloo can be used."""
    return bool(backend().supports("gloo_enabled"))


def gloo_built() -> bool:
    """Whether the backend supports Gloo."""
    return bool(backend().supports("gloo_built"))


def nccl_built() -> int:
    """NCCL's version as one number, 0 without NCCL."""
    return backend().supports("nccl_built")


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU. The arguments are Horovod's, and change nothing."""
    return bool(tf.config.list_physical_devices("GPU"))


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether the backend was built for CUDA."""
    return bool(backend().supports("cuda_built"))


def rocm_built() -> bool:
    """Whether the backend was built for ROCm."""
    return bool(backend().supports("rocm_built"))
