"""The reduction operations on PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.reduce_op import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    choose_op,
)
from hvd_order.engine.job import group_collectives
from hvd_order.engine.requests.adasum import adasum_in_place

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Reduction",
    "Sum",
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


@dataclass(frozen=True)
class Reduction:
    """An operation and its scaling.

    Attributes:
        op: the operation; for Adasum, the number of ranks must be a power of 2
            (`adasum.check_count`).
        prescale_factor: multiplies every rank's tensor before the reduction.
        postscale_factor: multiplies the result.
    """

    op: ReduceOp
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises InvalidUsage for a dtype that the operation or the scaling does not support."""
        op = self.op
        if dtype not in _REDUCIBLE:
            raise InvalidUsage(f"allreduce of {dtype} is not supported; convert the tensor first")
        if dtype is torch.bool and (op is Average or self._scales):
            raise InvalidUsage("truth values cannot be averaged or scaled; use hvd.Max for 'any'")
        if op is Adasum and not dtype.is_floating_point:
            raise InvalidUsage(f"Adasum is not defined for {dtype}; convert the tensor first")
        if dtype.is_complex and op not in (Average, Sum):
            raise InvalidUsage(f"{op.name} is not defined for {dtype}; use hvd.Sum or hvd.Average")

    @property
    def _scales(self) -> bool:
        return self.prescale_factor != 1.0 or self.postscale_factor != 1.0

    def __str__(self) -> str:
        text = f"op={self.op.name}"
        if self._scales:
            text += f" prescale_factor={self.prescale_factor!r}"
            text += f" postscale_factor={self.postscale_factor!r}"
        return text


def reduce_in_place(
    tensor: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None
) -> None:
    """Replaces `tensor` by the reduction over all ranks of `group`; None: this process alone.

    Scaling and averaging of integers truncate toward zero, as in Horovod. Blocks until done.

    Args:
        tensor: contiguous; its dtype has passed `Reduction.check_dtype`.
        reduction: the same on all ranks.
        group: all its ranks call this together.

    Raises:
        RuntimeError: torch.distributed's error, when a transfer fails.
    """
    if reduction.op is Adasum:
        reduce_by_adasum([tensor], reduction, group)
        return
    _scale(tensor, reduction.prescale_factor)
    if group is not None and tensor.numel() > 0:
        wide = tensor.to(torch.int32) if tensor.dtype is torch.int16 else tensor
        group_collectives.all_reduce(wide.view(-1), group, _C10D[reduction.op])
        if wide is not tensor:
            tensor.copy_(wide)
    _finish(tensor, reduction, 1 if group is None else group.size())


def reduce_by_adasum(
    tensors: Sequence[torch.Tensor], reduction: Reduction, group: dist.ProcessGroup | None
) -> None:
    """Same as `reduce_in_place` with Adasum, for several tensors of one dtype, each by itself."""
    for tensor in tensors:
        _scale(tensor, reduction.prescale_factor)
    adasum_in_place(tensors, group)
    for tensor in tensors:
        _scale(tensor, reduction.postscale_factor)


def reduce_pieces(pieces: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """Same reduction as `reduce_in_place`, but of local tensors, which it modifies."""
    for piece in pieces:
        _scale(piece, reduction.prescale_factor)
    result = pieces[0].clone()
    for piece in pieces[1:]:
        _COMBINE[reduction.op](result, piece, out=result)
    _finish(result, reduction, len(pieces))
    return result


def _finish(tensor: torch.Tensor, reduction: Reduction, count: int) -> None:
    """Divides an average by `count` and scales; truncates integers once, after both (Horovod)."""
    postscale_factor = reduction.postscale_factor
    if reduction.op is Average and count > 1:
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
