"""The interface between the TensorFlow code and its backend, torch.distributed (c10d.py).

The backend gets memory, shapes and names of dtypes, never a tensor of TensorFlow. `init` imports
it, and with it PyTorch; importing this package does not.
"""

# ruff: noqa: D102  (methods that are named as in Horovod's API do what they do there)

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage, NotInitialized
from hvd_order.base.reduce_op import ReduceOp

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
        format: of the codes that travel, as in `CodesOfGradients`; empty: the gradient does.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str = ""


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
    """The functions of the module c10d.py. All raise hvd_order's errors."""

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
            InvalidUsage: gradients are to be encoded and cannot be.
        """


@functools.cache  # one for the process, over all jobs
def backend() -> Backend:
    """Imports and returns the backend.

    Raises:
        InvalidUsage: PyTorch, or hvd_order's engine for it, is not installed.
    """
    if not all(importlib.util.find_spec(name) for name in ("torch", "hvd_order._native._torch")):
        raise InvalidUsage(
            "hvd_order.tensorflow sends through torch.distributed, which is not here; "
            "pip install torch, then hvd_order again"
        )
    return cast("Backend", importlib.import_module("hvd_order.tensorflow.backend.c10d"))


def started_backend() -> Backend:
    """Same as `backend`, but only after ``init()``.

    Raises:
        NotInitialized: before ``init()``.
    """
    if not backend.cache_info().currsize:
        raise NotInitialized("Horovod has not been initialized; use hvd.init().")
    return backend()
