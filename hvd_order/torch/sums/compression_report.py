"""Reports what fewer bits do to the gradients of one optimizer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CodedGradient"]


@dataclass(frozen=True)
class CodedGradient:
    """One gradient that travels in fewer bits.

    Attributes:
        name: of the parameter.
        format: of what travels: ``"int8"``, ``"bfloat16"`` or ``"float16"``.
        saved_bytes: what its sum saves each step, of the bytes of the gradient.
        relative_error: 2-norm of what codes of the last sum lack, relative to that of the sum; NaN
            if the sum is gone (``zero_grad(set_to_none=False)``) or zero.
        residual_norm: 2-norm of what this rank still owes to the sum.
    """

    name: str
    format: str
    saved_bytes: int
    relative_error: float
    residual_norm: float
