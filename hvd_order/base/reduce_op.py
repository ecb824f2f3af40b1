"""The reduction operations, with Horovod's names and numbers."""

from __future__ import annotations

import warnings
from enum import IntEnum

from hvd_order.base.errors import InvalidUsage

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum", "choose_op"]


class ReduceOp(IntEnum):
    """Operation that reduces the tensors of all ranks to one."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def choose_op(op: int | None, average: bool | None, adasum: bool = True) -> ReduceOp:
    """Returns the reduction that Horovod's two arguments select; Average when neither is given.

    Raises:
        ValueError: both are given (as in Horovod).
        InvalidUsage: the reduction does not exist, or is Adasum although ``adasum`` is False.
    """
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn(
            "the argument average is deprecated; write op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=4,
        )
        return Average if average else Sum
    if op is None:
        return Average
    try:
        chosen = ReduceOp(op)
    except ValueError:
        names = ", ".join(f"hvd.{known.name}" for known in ReduceOp if known != Adasum or adasum)
        raise InvalidUsage(f"op is {op!r}; expected one of {names}") from None
    if chosen is Adasum and not adasum:
        raise InvalidUsage("op=hvd.Adasum is for allreduce only; use hvd.Average or hvd.Sum")
    return chosen
