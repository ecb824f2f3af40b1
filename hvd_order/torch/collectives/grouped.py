"""Collectives on lists of tensors, which are sent together, as in Horovod."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.process_sets import ProcessSet, global_process_set, queue_for
from hvd_order.engine.requests import joined_rank_data
from hvd_order.engine.requests.adasum import check_count
from hvd_order.engine.requests.reduce_ops import (
    Adasum,
    Average,
    Reduction,
    choose_op,
    reduce_by_adasum,
    reduce_in_place,
)
from hvd_order.engine.requests.request import Request, Transfer
from hvd_order.engine.requests.request_parts import (
    check_tensor,
    deliver,
    describe,
    describe_rows,
    gather_rows,
    own_copy,
    own_rows,
    request_name,
    writable_buffer,
)
from hvd_order.torch.collectives.alltoall_reducescatter import (
    gradient_factor,
    joined_rank_scatter,
    rows_to_scatter,
    scatter_reduced,
    scatter_reduction,
)
from hvd_order.torch.collectives.compression import Compression, Compressor
from hvd_order.torch.collectives.single import allgather, synchronize

__all__ = [
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
]

# ---- allreduce --------------------------------------------------------------------------------


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors of one device, in few messages; differentiable.

    Args and errors are those of `allreduce`.

    Returns:
        New tensors, in the order of ``tensors``.
    """
    reduction = Reduction(choose_op(op, average), prescale_factor, postscale_factor)
    compressed, contexts = _compress(tensors, compression)
    reduced = _allreduce(compressed, name, reduction, process_set)
    return _decompress(reduced, contexts, compression)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `grouped_allreduce` and returns one handle for all tensors."""
    reduction = Reduction(choose_op(op, average), prescale_factor, postscale_factor)
    return _start_allreduce(tensors, name, reduction, process_set)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Like `grouped_allreduce`, in place and without gradients; returns the tensors."""
    reduction = Reduction(choose_op(op, average), prescale_factor, postscale_factor)
    handle = _start_allreduce(tensors, name, reduction, process_set, in_place=True)
    result: list[torch.Tensor] = synchronize(handle)
    return result


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `grouped_allreduce_` and returns one handle for all tensors."""
    reduction = Reduction(choose_op(op, average), prescale_factor, postscale_factor)
    return _start_allreduce(tensors, name, reduction, process_set, in_place=True)


def _allreduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
) -> Sequence[torch.Tensor]:
    """Reduces tensors, with gradients if one requires them."""
    if _differentiable(tensors):
        result: Sequence[torch.Tensor] = _DifferentiableGroupedAllreduce.apply(  # type: ignore[no-untyped-call]
            name, reduction, process_set, *tensors
        )
        return result
    result = synchronize(_start_allreduce(tensors, name, reduction, process_set))
    return result


def _start_allreduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
    in_place: bool = False,
) -> int:
    _check_group(tensors)
    buffers = [writable_buffer(each) if in_place else own_copy(each) for each in tensors]
    targets: Sequence[torch.Tensor | None] = list(tensors) if in_place else [None] * len(buffers)
    for buffer in buffers:
        reduction.check_dtype(buffer.dtype)
    if reduction.op is Adasum:
        check_count(len(process_set.ranks))

    def transfer(group: dist.ProcessGroup | None) -> None:
        for alike in _by_dtype(buffers):
            if reduction.op is Adasum:
                reduce_by_adasum(alike, reduction, group)
                continue
            fused = alike[0] if len(alike) == 1 else torch.cat([one.view(-1) for one in alike])
            reduce_in_place(fused, reduction, group)
            if len(alike) > 1:
                for one, part in zip(alike, fused.split([b.numel() for b in alike]), strict=True):
                    one.view(-1).copy_(part)

    def finish() -> list[torch.Tensor]:
        return [deliver(b, t) for b, t in zip(buffers, targets, strict=True)]

    stand_in = joined_rank_data.for_allreduce(buffers, reduction.op)
    return _submit("grouped_allreduce", name, str(reduction), buffers, describe, transfer, finish,
                   stand_in, process_set)  # fmt: skip


def _by_dtype(buffers: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in buffers:
        kinds.setdefault(buffer.dtype, []).append(buffer)
    return list(kinds.values())


# ---- allgather --------------------------------------------------------------------------------


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allgather` of several tensors of one device, with its arguments; differentiable."""
    if _differentiable(tensors):
        return list(
            _DifferentiableGroupedAllgather.apply(  # type: ignore[no-untyped-call]
                name, process_set, *tensors
            )
        )
    result: list[torch.Tensor] = synchronize(grouped_allgather_async(tensors, name, process_set))
    return result


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `grouped_allgather` and returns one handle for all tensors."""
    _check_group(tensors)
    rows = [own_rows(tensor) for tensor in tensors]
    result: list[torch.Tensor] = []

    def transfer(group: dist.ProcessGroup | None) -> None:
        result.extend(rows if group is None else [gather_rows(one, group) for one in rows])

    stand_in = joined_rank_data.for_allgather(rows)
    return _submit("grouped_allgather", name, "", rows, describe_rows, transfer, lambda: result,
                   stand_in, process_set)  # fmt: skip


# ---- reducescatter ----------------------------------------------------------------------------


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors of one device, with its arguments; differentiable."""
    reduction = scatter_reduction(op, prescale_factor, postscale_factor)
    compressed, contexts = _compress(tensors, compression)
    if _differentiable(compressed):
        reduced = _DifferentiableGroupedReducescatter.apply(  # type: ignore[no-untyped-call]
            name, reduction, process_set, *compressed
        )
    else:
        reduced = synchronize(_start_reducescatter(compressed, name, reduction, process_set))
    return _decompress(reduced, contexts, compression)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts `grouped_reducescatter` and returns one handle for all tensors."""
    reduction = scatter_reduction(op, prescale_factor, postscale_factor)
    return _start_reducescatter(tensors, name, reduction, process_set)


def _start_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
) -> int:
    _check_group(tensors)
    copies = [rows_to_scatter(tensor, reduction) for tensor in tensors]
    result: list[torch.Tensor] = []

    def transfer(group: dist.ProcessGroup | None) -> None:
        for rows in copies:
            result.append(scatter_reduced(rows, reduction, group))

    stand_in = joined_rank_scatter(copies, reduction)
    return _submit("grouped_reducescatter", name, str(reduction), copies, describe, transfer,
                   lambda: result, stand_in, process_set)  # fmt: skip


# ---- what they share --------------------------------------------------------------------------


def _check_group(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise InvalidUsage("the list of tensors is empty")
    for tensor in tensors:
        check_tensor(tensor)
    if len({tensor.device for tensor in tensors}) > 1:
        raise InvalidUsage("the tensors of a group must be on one device")


def _submit(
    kind: str,
    name: str | None,
    title: str,
    buffers: Sequence[torch.Tensor],
    line: Callable[[torch.Tensor], str],
    transfer: Transfer,
    finish: Callable[[], list[torch.Tensor]],
    stand_in: Transfer,
    process_set: ProcessSet,
) -> int:
    queue = queue_for(process_set)
    full_name = request_name(queue, kind, name)
    lines = [f"{full_name} {title}", *(f"[{i}] {line(b)}" for i, b in enumerate(buffers))]
    return queue.submit(Request(full_name, lines, transfer, finish, buffers[0].device, stand_in))


def _differentiable(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _compress(
    tensors: Sequence[torch.Tensor], compression: type[Compressor]
) -> tuple[list[torch.Tensor], list[Any]]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [context for _, context in pairs]


def _decompress(
    tensors: Sequence[torch.Tensor], contexts: Sequence[Any], compression: type[Compressor]
) -> list[torch.Tensor]:
    return [compression.decompress(t, c) for t, c in zip(tensors, contexts, strict=True)]


class _DifferentiableGroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        reduction: Reduction,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.reduction, ctx.process_set = reduction, process_set
        handle = _start_allreduce(tensors, name, reduction, process_set)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = _allreduce(grad_outputs, None, ctx.reduction, ctx.process_set)
        return None, None, None, *grads


class _DifferentiableGroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.process_set = process_set
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        averaged = grouped_allreduce(grad_outputs, process_set=ctx.process_set)
        counts = [shape[0] if shape else 1 for shape in ctx.shapes]
        everyones = allgather(torch.tensor([counts]), process_set=ctx.process_set)
        firsts = everyones[: ctx.process_set.rank()].sum(0).tolist()
        grads = [
            one.narrow(0, first, count).reshape(shape)
            for one, first, count, shape in zip(averaged, firsts, counts, ctx.shapes, strict=True)
        ]
        return None, None, *grads


class _DifferentiableGroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        reduction: Reduction,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = process_set
        ctx.factor = gradient_factor(reduction, process_set)
        return tuple(synchronize(_start_reducescatter(tensors, name, reduction, process_set)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [grad * ctx.factor for grad in grad_outputs]
        grads = grouped_allgather(scaled, process_set=ctx.process_set)
        return None, None, None, *grads
