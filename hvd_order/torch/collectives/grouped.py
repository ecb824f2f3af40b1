"""Collectives on lists of tensors, which are sent together, as in Horovod."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_order.c10d.process_sets import ProcessSet, global_process_set, queue_for
from hvd_order.c10d.requests import joined_rank_data
from hvd_order.c10d.requests.adasum import check_count
from hvd_order.c10d.requests.reduce_ops import (
    Adasum,
    Average,
    ReduceOp,
    check_dtype,
    choose_op,
    reduce_by_adasum,
    reduce_in_place,
)
from hvd_order.c10d.requests.request import Exchange, Request
from hvd_order.c10d.requests.request_parts import (
    check_tensor,
    deliver,
    describe,
    dtype_name,
    gather_rows,
    plain,
    request_name,
    writable_buffer,
)
from hvd_order.errors import InvalidUsage
from hvd_order.torch.collectives.alltoall_reducescatter import (
    gradient_factor,
    rows_to_scatter,
    scatter_reduced,
    stand_in_for_scatter,
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
    chosen = choose_op(op, average)
    compressed, contexts = _compress(tensors, compression)
    if _differentiable(compressed):
        reduced = _DifferentiableAllreduce.apply(  # type: ignore[no-untyped-call]
            name, chosen, prescale_factor, postscale_factor, process_set, *compressed
        )
    else:
        reduced = synchronize(
            grouped_allreduce_async(
                compressed, None, name, chosen, prescale_factor, postscale_factor, process_set
            )
        )
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
    chosen = choose_op(op, average)
    _check_group(tensors)
    buffers = [plain(t).clone(memory_format=torch.contiguous_format) for t in tensors]
    return _start_allreduce(
        buffers, [None] * len(buffers), name, chosen, prescale_factor, postscale_factor, process_set
    )


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
    chosen = choose_op(op, average)
    result: list[torch.Tensor] = synchronize(
        grouped_allreduce_async_(
            tensors, None, name, chosen, prescale_factor, postscale_factor, process_set
        )
    )
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
    chosen = choose_op(op, average)
    _check_group(tensors)
    buffers = [writable_buffer(tensor) for tensor in tensors]
    return _start_allreduce(
        buffers, list(tensors), name, chosen, prescale_factor, postscale_factor, process_set
    )


def _start_allreduce(
    buffers: list[torch.Tensor],
    targets: Sequence[torch.Tensor | None],
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> int:
    scaled = prescale_factor != 1.0 or postscale_factor != 1.0
    for buffer in buffers:
        check_dtype(buffer.dtype, op, scaled)
    if op is Adasum:
        check_count(len(process_set.ranks))

    def exchange(group: dist.ProcessGroup | None) -> None:
        for alike in _by_dtype(buffers):
            if op is Adasum:
                reduce_by_adasum(alike, prescale_factor, postscale_factor, group)
                continue
            fused = alike[0] if len(alike) == 1 else torch.cat([one.view(-1) for one in alike])
            reduce_in_place(fused, op, prescale_factor, postscale_factor, group)
            if len(alike) > 1:
                for one, part in zip(alike, fused.split([b.numel() for b in alike]), strict=True):
                    one.view(-1).copy_(part)

    def finish() -> list[torch.Tensor]:
        return [deliver(b, t) for b, t in zip(buffers, targets, strict=True)]

    title = f"op={op.name}"
    if scaled:
        title += f" prescale_factor={prescale_factor!r} postscale_factor={postscale_factor!r}"
    stand_in = joined_rank_data.for_allreduce(buffers, op)
    return _submit("grouped_allreduce", name, title, buffers, describe, exchange, finish, stand_in,
                   process_set)  # fmt: skip


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
            _DifferentiableAllgather.apply(  # type: ignore[no-untyped-call]
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
    copies = [plain(t).clone(memory_format=torch.contiguous_format) for t in tensors]
    rows = [one.reshape(1) if one.dim() == 0 else one for one in copies]
    result: list[torch.Tensor] = []

    def exchange(group: dist.ProcessGroup | None) -> None:
        result.extend(rows if group is None else [gather_rows(one, group) for one in rows])

    def line(one: torch.Tensor) -> str:
        return f"{dtype_name(one)} rows of shape {list(one.shape[1:])} on {one.device.type}"

    stand_in = joined_rank_data.for_allgather(rows)
    return _submit("grouped_allgather", name, "", rows, line, exchange, lambda: result, stand_in,
                   process_set)  # fmt: skip


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
    chosen = choose_op(op, None, adasum=False)
    compressed, contexts = _compress(tensors, compression)
    if _differentiable(compressed):
        reduced = _DifferentiableReducescatter.apply(  # type: ignore[no-untyped-call]
            name, chosen, process_set, prescale_factor, postscale_factor, *compressed
        )
    else:
        reduced = synchronize(
            grouped_reducescatter_async(
                compressed, name, chosen, process_set, prescale_factor, postscale_factor
            )
        )
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
    chosen = choose_op(op, None, adasum=False)
    _check_group(tensors)
    scaled = prescale_factor != 1.0 or postscale_factor != 1.0
    copies = [rows_to_scatter(tensor, chosen, scaled) for tensor in tensors]
    result: list[torch.Tensor] = []

    def exchange(group: dist.ProcessGroup | None) -> None:
        for rows in copies:
            result.append(scatter_reduced(rows, chosen, prescale_factor, postscale_factor, group))

    title = f"op={chosen.name}"
    if scaled:
        title += f" prescale_factor={prescale_factor!r} postscale_factor={postscale_factor!r}"
    stand_in = stand_in_for_scatter(copies, chosen)
    return _submit("grouped_reducescatter", name, title, copies, describe, exchange,
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
    exchange: Exchange,
    finish: Callable[[], list[torch.Tensor]],
    stand_in: Exchange,
    process_set: ProcessSet,
) -> int:
    queue = queue_for(process_set)
    full_name = request_name(queue, kind, name)
    lines = [f"{full_name} {title}", *(f"[{i}] {line(b)}" for i, b in enumerate(buffers))]
    return queue.submit(Request(full_name, lines, exchange, finish, buffers[0].device, stand_in))


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


class _DifferentiableAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (op, prescale_factor, postscale_factor, process_set)
        handle = grouped_allreduce_async(
            tensors, None, name, op, prescale_factor, postscale_factor, process_set
        )
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op, prescale_factor, postscale_factor, process_set = ctx.arguments
        grads = grouped_allreduce(
            grad_outputs,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        return None, None, None, None, None, *grads


class _DifferentiableAllgather(torch.autograd.Function):
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


class _DifferentiableReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = process_set
        ctx.factor = gradient_factor(op, process_set, prescale_factor, postscale_factor)
        handle = grouped_reducescatter_async(
            tensors, name, op, process_set, prescale_factor, postscale_factor
        )
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [grad * ctx.factor for grad in grad_outputs]
        grads = grouped_allgather(scaled, process_set=ctx.process_set)
        return None, None, None, None, None, *grads
