"""alltoall and reducescatter, as in Horovod. single.py has the rules for all collectives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.job import group_collectives
from hvd_order.engine.process_sets import ProcessSet, global_process_set, queue_for
from hvd_order.engine.requests.reduce_ops import (
    Average,
    Reduction,
    Sum,
    choose_op,
    reduce_pieces,
)
from hvd_order.engine.requests.request import Request, Transfer
from hvd_order.engine.requests.request_parts import (
    as_bytes,
    check_tensor,
    describe,
    describe_rows,
    own_copy,
    request_name,
)
from hvd_order.torch.collectives.compression import Compression, Compressor
from hvd_order.torch.collectives.single import allgather, synchronize

__all__ = ["alltoall", "alltoall_async", "reducescatter", "reducescatter_async"]

Splits = torch.Tensor | Sequence[int]


def alltoall(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends some rows of the tensor to each rank, and joins the rows it receives; differentiable.

    Args:
        tensor: the same dtype and shape on every rank except for the first dimension.
        splits: number of rows for each rank, in rank order; equal parts if None.
        name: shown in errors; must not be in flight already.
        process_set: the ranks that take part; only they may call.

    Returns:
        The rows from all ranks in rank order. With ``splits``, a tuple of the rows and the number
        of rows from each rank, in a tensor like ``splits`` (int32 on the CPU for a sequence). The
        gradient of each row returns to the rank that sent the row.

    Raises:
        ValueError: ``splits`` does not fit the tensor, or it is None and the first dimension is
            not divisible by the number of ranks.
        ModelMismatch, PeerLost, TransferTimeout: same as `allreduce`.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _DifferentiableAlltoall.apply(  # type: ignore[no-untyped-call]
            tensor, splits, name, process_set
        )
    rows, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `alltoall` and returns a handle; its result is always the tuple."""
    queue = queue_for(process_set)
    rows = own_copy(tensor)
    counts = _row_counts(rows, splits, len(process_set.ranks))
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
    full_name = request_name(queue, "alltoall", name)
    result: list[Any] = []

    def transfer(group: dist.ProcessGroup | None) -> None:
        received = counts if group is None else _exchange_counts(counts, group)
        out = rows if group is None else _exchange_rows(rows, counts, received, group)
        result.append((out, torch.tensor(received, dtype=like.dtype, device=like.device)))

    line = f"{full_name} {describe_rows(rows)}"
    return queue.submit(Request(full_name, [line], transfer, lambda: result[0], rows.device))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction of all ranks' tensors; differentiable.

    Args:
        tensor: the same shape and dtype on every rank, with at least one dimension.
        name: shown in errors; must not be in flight already.
        compression: how the tensor is compressed for transfer.
        op: Average, Sum, Min, Max or Product. Averages of integers truncate.
        process_set: the ranks that take part; only they may call.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        Rows in rank order; if the number of ranks does not divide them, the first ranks have one
        more. As in Horovod, the gradient joins all ranks' incoming gradients, multiplied by the
        number of ranks for Sum.

    Raises:
        The same as `allreduce`.
    """
    reduction = scatter_reduction(op, prescale_factor, postscale_factor)
    compressed, context = compression.compress(tensor)
    if torch.is_grad_enabled() and compressed.requires_grad:
        reduced = _DifferentiableReducescatter.apply(  # type: ignore[no-untyped-call]
            compressed, name, reduction, process_set
        )
    else:
        reduced = synchronize(_start_reducescatter(compressed, name, reduction, process_set))
    return compression.decompress(reduced, context)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts `reducescatter` and returns a handle."""
    reduction = scatter_reduction(op, prescale_factor, postscale_factor)
    return _start_reducescatter(tensor, name, reduction, process_set)


def scatter_reduction(op: int, prescale_factor: float, postscale_factor: float) -> Reduction:
    """Returns the reduction that the arguments of a reducescatter select.

    Raises:
        InvalidUsage: a reducescatter does not have this operation.
    """
    return Reduction(choose_op(op, None, adasum=False), prescale_factor, postscale_factor)


def _start_reducescatter(
    tensor: torch.Tensor, name: str | None, reduction: Reduction, process_set: ProcessSet
) -> int:
    queue = queue_for(process_set)
    rows = rows_to_scatter(tensor, reduction)
    full_name = request_name(queue, "reducescatter", name)
    result: list[torch.Tensor] = []

    def transfer(group: dist.ProcessGroup | None) -> None:
        result.append(scatter_reduced(rows, reduction, group))

    line = f"{full_name} {describe(rows)} {reduction}"
    return queue.submit(
        Request(
            full_name, [line], transfer, lambda: result[0], rows.device,
            joined_rank_scatter([rows], reduction),
        )
    )  # fmt: skip


def rows_to_scatter(tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """A copy of a tensor that can be reduced and scattered.

    Raises:
        InvalidUsage: the tensor cannot be reduced and scattered.
    """
    check_tensor(tensor)
    reduction.check_dtype(tensor.dtype)
    if tensor.dim() == 0:
        raise InvalidUsage("a tensor without dimensions has no rows to scatter; use allreduce")
    return own_copy(tensor)


def scatter_reduced(
    rows: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """This rank's part of the reduction; each part is sent once, to the rank that sums it."""
    size, mine = (1, 0) if group is None else (group.size(), group.rank())
    share, over = divmod(rows.shape[0], size)
    counts = [share + (rank < over) for rank in range(size)]
    received = [counts[mine]] * size
    pieces = rows if group is None else _exchange_rows(rows, counts, received, group)
    return reduce_pieces(
        list(pieces.split(counts[mine]) if counts[mine] else [pieces] * size), reduction
    )


def joined_rank_scatter(tensors: Sequence[torch.Tensor], reduction: Reduction) -> Transfer:
    """The part of a joined rank, whose rows of the result are dropped."""
    kinds = [(rows.dtype, tuple(rows.shape)) for rows in tensors]
    return partial(_scatter_zeros, kinds, tensors[0].device.type, Reduction(reduction.op))


def _scatter_zeros(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]],
    device: str,
    reduction: Reduction,
    group: dist.ProcessGroup,
) -> None:
    for dtype, shape in kinds:
        scatter_reduced(torch.zeros(shape, dtype=dtype, device=device), reduction, group)


def _row_counts(rows: torch.Tensor, splits: Splits | None, size: int) -> list[int]:
    if rows.dim() == 0:
        raise InvalidUsage("a tensor without dimensions has no rows to send; use allgather")
    if splits is None:
        share, over = divmod(rows.shape[0], size)
        if over:
            raise InvalidUsage(
                f"the first dimension is {rows.shape[0]}, which {size} ranks do not divide; pass "
                "splits"
            )
        return [share] * size
    counts = [int(count) for count in splits]
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows.shape[0]:
        raise InvalidUsage(
            f"splits is {counts}; expected {size} numbers, none negative, that add up to the first "
            f"dimension, {rows.shape[0]}"
        )
    return counts


def _exchange_counts(counts: list[int], group: dist.ProcessGroup) -> list[int]:
    """Number of rows that each rank is going to send to this one."""
    everyone = group_collectives.all_gather(torch.tensor(counts), group)
    return [int(one[group.rank()]) for one in everyone]


def _exchange_rows(
    rows: torch.Tensor, counts: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Sends `counts` rows to each rank and receives `received` rows from each."""
    row_bytes = rows.shape[1:].numel() * rows.element_size()
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    if row_bytes == 0:
        return result
    group_collectives.all_to_all(
        as_bytes(result), as_bytes(rows), [n * row_bytes for n in received],
        [n * row_bytes for n in counts], group,
    )  # fmt: skip
    return result


class _DifferentiableAlltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: Splits | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        rows, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set = process_set
        ctx.received = received.tolist()
        if splits is None:
            return rows
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, _ = alltoall(grad_outputs[0], ctx.received, process_set=ctx.process_set)
        return grad, None, None, None


class _DifferentiableReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        reduction: Reduction,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.process_set = process_set
        ctx.factor = gradient_factor(reduction, process_set)
        handle = _start_reducescatter(tensor, name, reduction, process_set)
        result: torch.Tensor = synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = allgather(grad_outputs[0] * ctx.factor, process_set=ctx.process_set)
        return grad, None, None, None


def gradient_factor(reduction: Reduction, process_set: ProcessSet) -> float:
    """Horovod's factor for the incoming gradients of a reducescatter."""
    ranks = len(process_set.ranks) if reduction.op == Sum else 1
    return ranks * reduction.prescale_factor * reduction.postscale_factor
