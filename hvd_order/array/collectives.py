"""The collectives of `hvd_order.torch` for arrays, with the same queue, errors and rules.

DLPack passes arguments and results without a copy. A collective exchanges one copy of the
argument; a function ending in ``_`` exchanges the argument itself. Results are arrays of the
library, dtype and device of the argument. An array that is exchanged in place must not be touched
until `synchronize` has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import hvd_order.torch as hvd
from hvd_order.array.dlpack import (
    Array,
    back_to,
    hand_to,
    order_behind,
    to_tensor,
    to_writable_tensor,
)
from hvd_order.engine.job import process
from hvd_order.engine.job.job import Job

if TYPE_CHECKING:
    import torch

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]

A = TypeVar("A", bound=Array)
Splits = Array | Sequence[int]


def allreduce(
    array: A,
    *,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> A:
    """The reduction of all ranks' arrays.

    Args:
        array: the same shape and dtype on every rank.
        name: shown in errors; two requests of one name must not be in flight together.
        op: Average (the default), Sum, Min, Max or Product. Averages of integers truncate.
        prescale_factor: multiplies each rank's array before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; only they may call.

    Returns:
        A new array.

    Raises:
        ValueError: a mistake in the arguments, or an array that cannot be exchanged.
        ModelMismatch: another rank called a different collective (raised on every rank).
        PeerLost, TransferTimeout: another rank died, or did not call in time.
    """
    result: A = synchronize(
        allreduce_async(
            array, name=name, op=op, prescale_factor=prescale_factor,
            postscale_factor=postscale_factor, process_set=process_set,
        )
    )  # fmt: skip
    return result


def allreduce_async(
    array: Array,
    *,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> int:
    """Starts `allreduce` and returns a handle; the array is read at once and may be changed."""
    return _start(
        array,
        lambda tensor: hvd.allreduce_async(
            tensor, None, name, op, prescale_factor, postscale_factor, process_set
        ),
    )


def allreduce_(
    array: A,
    *,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> A:
    """Like `allreduce`, in the array's own memory; returns `array`."""
    result: A = synchronize(
        allreduce_async_(
            array, name=name, op=op, prescale_factor=prescale_factor,
            postscale_factor=postscale_factor, process_set=process_set,
        )
    )  # fmt: skip
    return result


def allreduce_async_(
    array: Array,
    *,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> int:
    """Starts `allreduce_` and returns a handle."""
    return _start_in_place(
        array,
        lambda tensor: hvd.allreduce_async_(
            tensor, None, name, op, prescale_factor, postscale_factor, process_set
        ),
    )


def allgather(
    array: A, *, name: str | None = None, process_set: hvd.ProcessSet = hvd.global_process_set
) -> A:
    """All ranks' arrays, joined along the first dimension in rank order.

    Args:
        array: the same dtype and shape on every rank except for the first dimension, which may
            differ and be 0. An array without dimensions counts as one of shape [1].
        name: shown in errors; must not be in flight already.
        process_set: the ranks that take part; only they may call.

    Returns:
        A new array.

    Raises:
        The same as `allreduce`.
    """
    result: A = synchronize(allgather_async(array, name=name, process_set=process_set))
    return result


def allgather_async(
    array: Array, *, name: str | None = None, process_set: hvd.ProcessSet = hvd.global_process_set
) -> int:
    """Starts `allgather` and returns a handle; the array is read at once and may be changed."""
    return _start(array, lambda tensor: hvd.allgather_async(tensor, name, process_set))


def broadcast(
    array: A,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> A:
    """The array of rank `root_rank`, on every rank.

    Args:
        array: the same shape and dtype on every rank; only the root's values are used.
        root_rank: rank in the job, as in Horovod, whose values are sent.
        name: shown in errors; must not be in flight already.
        process_set: the ranks that take part; only they may call.

    Returns:
        A new array.

    Raises:
        The same as `allreduce`.
    """
    result: A = synchronize(broadcast_async(array, root_rank, name=name, process_set=process_set))
    return result


def broadcast_async(
    array: Array,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> int:
    """Starts `broadcast` and returns a handle; the array is read at once and may be changed."""
    return _start(array, lambda tensor: hvd.broadcast_async(tensor, root_rank, name, process_set))


def broadcast_(
    array: A,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> A:
    """Like `broadcast`, in the array's own memory; returns `array`."""
    result: A = synchronize(broadcast_async_(array, root_rank, name=name, process_set=process_set))
    return result


def broadcast_async_(
    array: Array,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> int:
    """Starts `broadcast_` and returns a handle."""
    return _start_in_place(
        array, lambda tensor: hvd.broadcast_async_(tensor, root_rank, name, process_set)
    )


def alltoall(
    array: A,
    splits: Splits | None = None,
    *,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> A | tuple[A, A]:
    """Sends some rows of the array to each rank, and joins the rows it receives.

    Args:
        array: the same dtype and shape on every rank except for the first dimension.
        splits: number of rows for each rank, in rank order; equal parts if None.
        name: shown in errors; must not be in flight already.
        process_set: the ranks that take part; only they may call.

    Returns:
        The rows from all ranks in rank order. With ``splits``, a tuple of the rows and the number
        of rows from each rank, as an array of the same library and device (of the dtype of
        ``splits``; int32 for a sequence).

    Raises:
        ValueError: ``splits`` does not fit the array, or it is None and the first dimension is not
            divisible by the number of ranks.
        ModelMismatch, PeerLost, TransferTimeout: same as `allreduce`.
    """
    rows: A
    received: A
    rows, received = synchronize(alltoall_async(array, splits, name=name, process_set=process_set))
    return rows if splits is None else (rows, received)


def alltoall_async(
    array: Array,
    splits: Splits | None = None,
    *,
    name: str | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> int:
    """Starts `alltoall` and returns a handle; its result is always the tuple."""
    tensor, back = to_tensor(array), back_to(array)
    counts = splits if splits is None or isinstance(splits, Sequence) else to_tensor(splits)
    handle = hvd.alltoall_async(tensor, counts, name, process_set)
    order_behind(array, tensor)

    def deliver(both: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
        return hand_to(back, both[0]), hand_to(back, both[1].to(tensor.device))

    return _remember(handle, deliver)


def reducescatter(
    array: A,
    *,
    name: str | None = None,
    op: int = hvd.Average,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> A:
    """This rank's rows of the reduction of all ranks' arrays.

    Args:
        array: the same shape and dtype on every rank, with at least one dimension.
        name: shown in errors; must not be in flight already.
        op: Average, Sum, Min, Max or Product. Averages of integers truncate.
        process_set: the ranks that take part; only they may call.
        prescale_factor: multiplies each rank's array before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        Rows in rank order; if the number of ranks does not divide them, the first ranks have one
        more.

    Raises:
        The same as `allreduce`.
    """
    result: A = synchronize(
        reducescatter_async(
            array, name=name, op=op, process_set=process_set,
            prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        )
    )  # fmt: skip
    return result


def reducescatter_async(
    array: Array,
    *,
    name: str | None = None,
    op: int = hvd.Average,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts `reducescatter` and returns a handle; the array may be changed at once."""
    return _start(
        array,
        lambda tensor: hvd.reducescatter_async(
            tensor, name, op, process_set, prescale_factor, postscale_factor
        ),
    )


def poll(handle: int) -> bool:
    """Whether the collective is done, so that `synchronize` returns at once.

    Raises:
        ValueError: `synchronize` has returned for this handle, or the handle never existed.
    """
    return hvd.poll(handle)


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous collective and returns its result.

    Returns:
        The array, or the tuple for `alltoall`; None if the handle is unknown or was synchronized
        before (as in Horovod).

    Raises:
        ModelMismatch, PeerLost, TransferTimeout, HorovodInternalError: the collective failed.
    """
    deliver = process.current().part(_Waiting).pop(handle)
    result = hvd.synchronize(handle)
    return result if deliver is None else deliver(result)


class _Waiting:
    """How to return the result of each handle to its caller: a part of the `Job`.

    The shutdown drops the handles that were never waited for.
    """

    def __init__(self, job: Job) -> None:
        self._lock = threading.Lock()  # guards the field below
        self._deliver: dict[int, Callable[[Any], Any]] = {}

    def remember(self, handle: int, deliver: Callable[[Any], Any]) -> int:
        with self._lock:
            self._deliver[handle] = deliver
        return handle

    def pop(self, handle: int) -> Callable[[Any], Any] | None:
        with self._lock:
            return self._deliver.pop(handle, None)


def _start(array: Array, collective: Callable[[torch.Tensor], int]) -> int:
    """Starts a collective that reads the array at once and returns a new one."""
    tensor, back = to_tensor(array), back_to(array)
    handle = collective(tensor)
    order_behind(array, tensor)
    return _remember(handle, lambda result: hand_to(back, result))


def _start_in_place(array: Array, collective: Callable[[torch.Tensor], int]) -> int:
    """Starts a collective that writes its result into the array."""
    handle = collective(to_writable_tensor(array))
    return _remember(handle, _written(array))


def _remember(handle: int, deliver: Callable[[Any], Any]) -> int:
    return process.current().part(_Waiting).remember(handle, deliver)


def _written(array: Array) -> Callable[[Any], Any]:
    def deliver(tensor: Any) -> Array:
        order_behind(array, tensor)
        return array

    return deliver
