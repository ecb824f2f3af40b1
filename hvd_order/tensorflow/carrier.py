"""The seam between TensorFlow's side and what carries bytes between processes.

Whatever implements `Carrier` will do: it sees memory, shapes and names of dtypes, never a tensor
of TensorFlow. There is one so far, torch.distributed (c10d.py); it is imported by `init`, never by
importing this package.
"""

# ruff: noqa: D102  (methods that are named as in Horovod's API do what they do there)

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from hvd_order.errors import InvalidUsage, NotInitialized
from hvd_order.reduce_op import ReduceOp

__all__ = [
    "Carrier",
    "Collective",
    "Gradient",
    "GradientModel",
    "HostTensor",
    "carrier",
    "started_carrier",
]


@dataclass(frozen=True)
class HostTensor:
    """A tensor in host memory, contiguous.

    Attributes:
        dtype: its name in numpy, or "bfloat16".
        address: of its first byte; of no meaning if it has no elements.
        owner: whatever keeps the memory.
    """

    dtype: str
    shape: tuple[int, ...]
    address: int
    owner: object = None


@dataclass(frozen=True)
class Collective:
    """What an operator of a graph asks for, each time that it is executed.

    Attributes:
        kind: "allreduce", "allgather", "broadcast", "alltoall", "reducescatter" or "barrier".
        name: what the ranks' calls are matched by; None: by how many came before.
        grouped: several tensors at once, as one.
        root_rank: of a broadcast.
        process_set: its number.
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
    """A gradient that will travel: of the same shape and dtype on every rank.

    Attributes:
        name: for messages and the timeline; it may differ between ranks, since frameworks count
            what a process has made before.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class GradientModel(Protocol):
    """Gradients that are registered with the engine.

    Attributes:
        number: by which operators know it; the n-th gradient is its slot n.
        posts: how many gradients this process has posted.
    """

    @property
    def number(self) -> int: ...

    @property
    def posts(self) -> int: ...

    def close(self) -> None:
        """Ends what is under way with an error; a second call does nothing."""


class Carrier(Protocol):
    """What can carry; a module that has these functions will do. All raise hvd_order's errors."""

    def init(self, comm: object) -> None: ...
    def shutdown(self) -> None: ...
    def on_shutdown(self, callback: Callable[[], None]) -> None:
        """Has `callback` run before the processes part."""

    def is_initialized(self) -> bool: ...
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
        """Registers it on all ranks of the job and returns its number."""

    def remove_process_set(self, number: int) -> bool: ...

    def start(
        self, collective: Collective, tensors: Sequence[HostTensor]
    ) -> Callable[[], list[HostTensor]]:
        """Starts a collective; what is returned waits for it. The tensors stay until then."""

    def join(self) -> int: ...
    def broadcast_object(self, obj: Any, root_rank: int, name: str | None, number: int) -> Any: ...
    def allgather_object(self, obj: Any, name: str | None, number: int) -> list[Any]: ...

    def engine_api(self) -> int:
        """Address of the engine's function table for operators."""

    def register(self, gradients: Sequence[Gradient], number: int) -> GradientModel:
        """Registers gradients, most urgent first, on all ranks of a process set of several.

        They are matched by their places.

        Raises:
            ModelMismatch: the ranks have different gradients.
        """


_started: Carrier | None = None


def carrier() -> Carrier:
    """What carries bytes in this process; imports it.

    Raises:
        InvalidUsage: there is nothing here that could.
    """
    global _started
    if _started is None:
        if importlib.util.find_spec("torch") is None:
            raise InvalidUsage(
                "nothing here can carry bytes between processes: hvd_order.tensorflow uses "
                "torch.distributed for that so far; install it with: pip install torch, and build "
                "hvd_order again with: pip install --no-build-isolation ."
            )
        from hvd_order.tensorflow import c10d

        _started = cast("Carrier", c10d)
    return _started


def started_carrier() -> Carrier:
    """The same after ``init()``.

    Raises:
        NotInitialized: before it.
    """
    if _started is None:
        raise NotInitialized("Horovod has not been initialized; use hvd.init().")
    return _started
