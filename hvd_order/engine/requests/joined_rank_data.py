"""Data that a joined rank sends in place of its tensors: zeros, or no rows.

As in Horovod, an average still divides by the number of all ranks, and Min, Max and Product see
zeros. Horovod refuses everything but allreduce while a rank has joined; here gathered tensors just
have no rows from that rank. These functions are pickled, so they are at the top level of their
modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from hvd_order.engine.requests.reduce_ops import (
    Adasum,
    ReduceOp,
    Reduction,
    reduce_by_adasum,
    reduce_in_place,
)
from hvd_order.engine.requests.request import Transfer
from hvd_order.engine.requests.request_parts import gather_rows

__all__: list[str] = []


def for_allreduce(buffers: Sequence[torch.Tensor], op: ReduceOp) -> Transfer:
    """Returns the stand-in for an allreduce, in which the tensors of each dtype travel as one."""
    device = buffers[0].device.type
    if op is Adasum:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for buffer in buffers:
            by_dtype.setdefault(buffer.dtype, []).append(buffer.numel())
        return partial(_adasum_zeros, list(by_dtype.items()), device)
    counts: dict[torch.dtype, int] = {}
    for buffer in buffers:
        counts[buffer.dtype] = counts.get(buffer.dtype, 0) + buffer.numel()
    return partial(_reduce_zeros, list(counts.items()), device, op)


def for_allgather(tensors: Sequence[torch.Tensor]) -> Transfer:
    """Returns the stand-in for an allgather, in which rows are gathered tensor by tensor."""
    kinds = [(rows.dtype, tuple(rows.shape[1:])) for rows in tensors]
    return partial(_gather_nothing, kinds, tensors[0].device.type)


def for_barrier(group: dist.ProcessGroup | None) -> None:
    """Stands in at a barrier: a joined rank has reached every barrier."""


def _reduce_zeros(
    counts: list[tuple[torch.dtype, int]], device: str, op: ReduceOp, group: dist.ProcessGroup
) -> None:
    for dtype, count in counts:
        reduce_in_place(torch.zeros(count, dtype=dtype, device=device), Reduction(op), group)


def _adasum_zeros(
    counts: list[tuple[torch.dtype, list[int]]], device: str, group: dist.ProcessGroup
) -> None:
    for dtype, of_each in counts:
        reduce_by_adasum(
            [torch.zeros(count, dtype=dtype, device=device) for count in of_each],
            Reduction(Adasum),
            group,
        )


def _gather_nothing(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]], device: str, group: dist.ProcessGroup
) -> None:
    for dtype, shape in kinds:
        gather_rows(torch.empty((0, *shape), dtype=dtype, device=device), group)
