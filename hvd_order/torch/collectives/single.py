"""allreduce, allgather, broadcast and their asynchronous and in-place variants, as in Horovod.

Every rank must call the same collectives. Calls with names may come in any order, at least
asynchronous ones; calls without names must come in the same order. Tensors may be on the CPU or on
CUDA, of any shape (none and zero elements included), contiguous or not. The variants ending in
``_`` write into their argument. The asynchronous ones return a handle for `poll` and
`synchronize`; the tensors must not be touched until `synchronize` has returned.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hvd_order.engine.job import group_collectives, process
from hvd_order.engine.process_sets import (
    ProcessSet,
    check_root,
    global_process_set,
    queue_for,
)
from hvd_order.engine.requests import joined_rank_data
from hvd_order.engine.requests.adasum import check_count
from hvd_order.engine.requests.queues import queue_of
from hvd_order.engine.requests.reduce_ops import (
    Adasum,
    Reduction,
    choose_op,
    reduce_in_place,
)
from hvd_order.engine.requests.request import Request
from hvd_order.engine.requests.request_parts import (
    as_bytes,
    deliver,
    describe,
    describe_rows,
    gather_rows,
    own_copy,
    own_rows,
    request_name,
    writable_buffer,
)
from hvd_order.torch.collectives.compression import Compression, Compressor

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "poll",
    "synchronize",
]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The reduction of all ranks' tensors; differentiable.

    Args:
        tensor: the same shape and dtype on every rank.
        average: deprecated; use `op`.
        name: matches the calls of the ranks and is shown in errors; two requests of one name must
            not be in flight together. Calls without a name are matched by the number of such calls
            before them.
        compression: how the tensor is compressed for transfer.
        op: Average (the default), Sum, Min, Max, Product or Adasum. Averages of integers truncate.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; only they may call.

    Returns:
        A new tensor; its gradient is the same reduction of the incoming gradients.

    Raises:
        ValueError: a mistake in the arguments.
        NotImplementedError: Adasum of a number of ranks that is not a power of 2.
        ModelMismatch: another rank called a different collective (raised on every rank).
        PeerLost, TransferTimeout: another rank died, or did not call in time.
    """
    reduction = Reduction(choose_op(op, average), prescale_factor, postscale_factor)
    compressed, context = compression.compress(tensor)
    reduced = _allreduce(compressed, name, reduction, process_set)
    return compression.decompress(reduced, context)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `allreduce` and returns a handle; the tensor is read at once and may be changed."""
    reduction = Reduction(choose_op(op, average), prescale_factor, postscale_factor)
    return _start_allreduce(own_copy(tensor), None, name, reduction, process_set)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Like `allreduce`, in place and without gradients; returns `tensor`."""
    reduction = Reduction(choose_op(op, average), prescale_factor, postscale_factor)
    handle = _start_allreduce(writable_buffer(tensor), tensor, name, reduction, process_set)
    result: torch.Tensor = synchronize(handle)
    return result


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `allreduce_` and returns a handle."""
    reduction = Reduction(choose_op(op, average), prescale_factor, postscale_factor)
    return _start_allreduce(writable_buffer(tensor), tensor, name, reduction, process_set)


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """All ranks' tensors, joined along the first dimension in rank order; differentiable.

    Args:
        tensor: the same dtype and shape on every rank except for the first dimension, which may
            differ and be 0. A tensor without dimensions counts as one of shape [1].
        name: shown in errors; must not be in flight already.
        process_set: the ranks that take part; only they may call.

    Returns:
        A new tensor. As in Horovod, its gradient is this rank's rows of the incoming gradients,
        averaged over all ranks.

    Raises:
        The same as `allreduce`.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: torch.Tensor = _DifferentiableAllgather.apply(  # type: ignore[no-untyped-call]
            tensor, name, process_set
        )
        return result
    result = synchronize(allgather_async(tensor, name, process_set))
    return result


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `allgather` and returns a handle."""
    queue = queue_for(process_set)
    rows = own_rows(tensor)
    full_name = request_name(queue, "allgather", name)
    result: list[torch.Tensor] = []

    def transfer(group: dist.ProcessGroup | None) -> None:
        result.append(rows if group is None else gather_rows(rows, group))

    line = f"{full_name} {describe_rows(rows)}"
    return queue.submit(
        Request(
            full_name, [line], transfer, lambda: result[0], rows.device,
            joined_rank_data.for_allgather([rows]),
        )
    )  # fmt: skip


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of rank `root_rank`, on every rank; differentiable.

    Args:
        tensor: the same shape and dtype on every rank; only the root's values are used.
        root_rank: rank in the job, as in Horovod, whose values are sent.
        name: shown in errors; must not be in flight already.
        process_set: the ranks that take part; only they may call.

    Returns:
        A new tensor. As in Horovod, its gradient is the average of all ranks' incoming gradients
        on the root, and zero on the other ranks.

    Raises:
        The same as `allreduce`.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: torch.Tensor = _DifferentiableBroadcast.apply(  # type: ignore[no-untyped-call]
            tensor, root_rank, name, process_set
        )
        return result
    result = synchronize(broadcast_async(tensor, root_rank, name, process_set))
    return result


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `broadcast` and returns a handle."""
    return _start_broadcast(own_copy(tensor), None, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Like `broadcast`, in place and without gradients; returns `tensor`."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `broadcast_` and returns a handle."""
    return _start_broadcast(writable_buffer(tensor), tensor, root_rank, name, process_set)


def poll(handle: int) -> bool:
    """Whether the collective is done, so that `synchronize` returns at once.

    Raises:
        ValueError: `synchronize` has returned for this handle, or the handle never existed.
    """
    return queue_of(handle).poll(handle)


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous collective and returns its result.

    Returns:
        The tensor; None if the handle is unknown or was synchronized before (as in Horovod).

    Raises:
        ModelMismatch, PeerLost, TransferTimeout, HorovodInternalError: the collective failed.
    """
    return queue_of(handle).synchronize(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank has called `barrier`.

    Raises:
        The same as `allreduce`.
    """
    queue = queue_for(process_set)
    name = queue.next_name("barrier")
    queue.run(
        Request(
            name, [name], lambda group: None, lambda: None, torch.device("cpu"),
            joined_rank_data.for_barrier,
        )
    )  # fmt: skip


def _allreduce(
    tensor: torch.Tensor, name: str | None, reduction: Reduction, process_set: ProcessSet
) -> torch.Tensor:
    """Reduces a tensor, with a gradient if it requires one."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: torch.Tensor = _DifferentiableAllreduce.apply(  # type: ignore[no-untyped-call]
            tensor, name, reduction, process_set
        )
        return result
    result = synchronize(_start_allreduce(own_copy(tensor), None, name, reduction, process_set))
    return result


def _start_allreduce(
    buffer: torch.Tensor,
    target: torch.Tensor | None,
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
) -> int:
    """Reduces `buffer` in place; `synchronize` puts the result into `target`."""
    queue = queue_for(process_set)
    reduction.check_dtype(buffer.dtype)
    if reduction.op is Adasum:
        check_count(len(process_set.ranks))
    full_name = request_name(queue, "allreduce", name)
    line = f"{full_name} {describe(buffer)} {reduction}"

    def transfer(group: dist.ProcessGroup | None) -> None:
        reduce_in_place(buffer, reduction, group)

    return queue.submit(
        Request(
            full_name, [line], transfer, lambda: deliver(buffer, target), buffer.device,
            joined_rank_data.for_allreduce([buffer], reduction.op),
        )
    )  # fmt: skip


def _start_broadcast(
    buffer: torch.Tensor,
    target: torch.Tensor | None,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> int:
    """Overwrites `buffer` with the root's; `synchronize` puts the result into `target`."""
    queue = queue_for(process_set)
    check_root(root_rank, process_set)
    root = process_set.ranks.index(root_rank)
    full_name = request_name(queue, "broadcast", name)

    def transfer(group: dist.ProcessGroup | None) -> None:
        if group is not None and buffer.numel() > 0:
            group_collectives.broadcast(as_bytes(buffer), root, group)

    line = f"{full_name} {describe(buffer)} root_rank={root_rank}"
    return queue.submit(
        Request(full_name, [line], transfer, lambda: deliver(buffer, target), buffer.device)
    )


class _DifferentiableAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        reduction: Reduction,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.reduction, ctx.process_set = reduction, process_set
        handle = _start_allreduce(own_copy(tensor), None, name, reduction, process_set)
        result: torch.Tensor = synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = _allreduce(grad_outputs[0], None, ctx.reduction, ctx.process_set)
        return grad, None, None, None


class _DifferentiableAllgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.shape = tensor.shape
        ctx.process_set = process_set
        result: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        averaged = allreduce(grad_outputs[0], process_set=ctx.process_set)
        count = ctx.shape[0] if ctx.shape else 1
        counts = allgather(torch.tensor([count]), process_set=ctx.process_set)
        first = int(counts[: ctx.process_set.rank()].sum())
        return averaged.narrow(0, first, count).reshape(ctx.shape), None, None


class _DifferentiableBroadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        averaged = allreduce(grad_outputs[0], process_set=ctx.process_set)
        grad = averaged if process.rank() == ctx.root_rank else torch.zeros_like(averaged)
        return grad, None, None, None
