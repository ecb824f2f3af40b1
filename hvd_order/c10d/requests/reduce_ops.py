"""The reduction operations on PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hvd_order.c10d.job import group_collectives
from hvd_order.c10d.requests.adasum import adasum_in_place
from hvd_order.errors import InvalidUsage
from hvd_order.reduce_op import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    choose_op,
)

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "check_dtype",
    "choose_op",
    "reduce_by_adasum",
    "reduce_in_place",
    "reduce_pieces",
]


_C10D = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    Average: torch.add,
    Sum: torch.add,
    Min: torch.minimum,
    Max: torch.maximum,
    Product: torch.mul,
}
# Dtypes that Gloo and NCCL both reduce; int16 travels as int32.
_REDUCIBLE = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
}


def check_dtype(dtype: torch.dtype, op: ReduceOp, scaled: bool) -> None:
    """Raises InvalidUsage for a dtype that `op` does not support, with scaling if `scaled`."""
    if dtype not in _REDUCIBLE:
        raise InvalidUsage(f"allreduce of {dtype} is not supported; convert the tensor first")
    if dtype is torch.bool and (op is Average or scaled):
        raise InvalidUsage("truth values cannot be averaged or scaled; use hvd.Max for 'any'")
    if op is Adasum and not dtype.is_floating_point:
        raise InvalidUsage(f"Adasum is not defined for {dtype}; convert the tensor first")
    if dtype.is_complex and op not in (Average, Sum):
        raise InvalidUsage(f"{op.name} is not defined for {dtype}; use hvd.Sum or hvd.Average")


def reduce_in_place(
    tensor: torch.Tensor,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    group: dist.ProcessGroup | None,
) -> None:
    """Replaces `tensor` by the reduction over all ranks of `group`; None: this process alone.

    Scaling and averaging of integers truncate toward zero, as in Horovod. Blocks until done.

    Args:
        tensor: contiguous; its dtype has passed `check_dtype`.
        op: the reduction; for Adasum, the group must have a power of 2 ranks
            (`adasum.check_count`).
        prescale_factor: multiplies every rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        group: all its ranks call this together.

    Raises:
        RuntimeError: torch.distributed's error, when a transfer fails.
    """
    if op is Adasum:
        reduce_by_adasum([tensor], prescale_factor, postscale_factor, group)
        return
    _scale(tensor, prescale_factor)
    if group is not None and tensor.numel() > 0:
        wide = tensor.to(torch.int32) if tensor.dtype is torch.int16 else tensor
        group_collectives.all_reduce(wide.view(-1), group, _C10D[op])
        if wide is not tensor:
            tensor.copy_(wide)
    _finish(tensor, op, 1 if group is None else group.size(), postscale_factor)


def reduce_by_adasum(
    tensors: Sequence[torch.Tensor],
    prescale_factor: float,
    postscale_factor: float,
    group: dist.ProcessGroup | None,
) -> None:
    """Same as `reduce_in_place` with Adasum, for several tensors of one dtype, each by itself."""
    for tensor in tensors:
        _scale(tensor, prescale_factor)
    adasum_in_place(tensors, group)
    for tensor in tensors:
        _scale(tensor, postscale_factor)


def reduce_pieces(
    pieces: Sequence[torch.Tensor], op: ReduceOp, prescale_factor: float, postscale_factor: float
) -> torch.Tensor:
    """Same reduction as `reduce_in_place`, but of local tensors, which it modifies."""
    for piece in pieces:
        _scale(piece, prescale_factor)
    result = pieces[0].clone()
    for piece in pieces[1:]:
        _COMBINE[op](result, piece, out=result)
    _finish(result, op, len(pieces), postscale_factor)
    return result


def _finish(tensor: torch.Tensor, op: ReduceOp, count: int, postscale_factor: float) -> None:
    """Divides an average by `count` and scales; truncates integers once, after both (Horovod)."""
    if op is Average and count > 1:
        if postscale_factor != 1.0 and not tensor.is_floating_point() and not tensor.is_complex():
            postscale_factor /= count
        else:
            _divide(tensor, count)
    _scale(tensor, postscale_factor)


def _divide(tensor: torch.Tensor, count: int) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(count)
    else:
        tensor.div_(count, rounding_mode="trunc")


def _scale(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.to(torch.float64).mul_(factor).trunc_())
