"""What is sent in place of a tensor: the tensor itself, or 16 bits an element."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvd_order.base.errors import InvalidUsage

__all__ = ["CodedSums", "Compression", "Compressor"]


class Compressor:
    """Horovod's interface; derive from it and pass the class as ``compression=``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and the context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The original tensor, restored from the received one."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """`tensor` itself, unchanged."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """`tensor` itself, unchanged."""
        return tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """Casts wider floating point tensors to `dtype`; keeps integers and narrow floats."""
    if tensor.is_floating_point() and tensor.element_size() > dtype.itemsize:
        return tensor.to(dtype), tensor.dtype
    return tensor, tensor.dtype


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16: half the bytes, 11 bits, largest value 65504."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """`tensor` in float16 if it is a wider floating point tensor; and its original dtype."""
        return _cast(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """`tensor` in its original dtype."""
        return tensor.to(ctx)


class BF16Compressor(Compressor):
    """Sends float32 and float64 as bfloat16: half the bytes, 8 bits, float32's range."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """`tensor` in bfloat16 if it is a wider floating point tensor; and its original dtype."""
        return _cast(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """`tensor` in its original dtype."""
        return tensor.to(ctx)


class FP16FeedbackCompressor(FP16Compressor):
    """As `FP16Compressor`; a `DistributedOptimizer` adds what a cast lost to the next gradient."""


class BF16FeedbackCompressor(BF16Compressor):
    """As `BF16Compressor`; a `DistributedOptimizer` adds what a cast lost to the next gradient."""


class CodedSums(Compressor):
    """Codes of 8 bits on the wire, and sums in float32 (csrc/torch/cuda/codes.h).

    A sum of codes is no code of the sum, so each rank adds up its share of the decoded gradients
    and encodes the sum once: only a `DistributedOptimizer` over torch.distributed does this.

    Attributes:
        keep: parameters that travel exactly, as parts of their names.
    """

    def __init__(self, keep: Iterable[str] = ()) -> None:
        """Takes the parameters that travel exactly.

        Raises:
            ValueError: one is not text.
        """
        self.keep = (keep,) if isinstance(keep, str) else tuple(keep)
        if not all(isinstance(part, str) for part in self.keep):
            raise ValueError(f"keep= takes parts of parameters' names, not {list(self.keep)}")

    def __call__(self, keep: Iterable[str] = ()) -> CodedSums:
        """The same with exceptions: ``Compression.int8(keep=["router"])``."""
        return type(self)(keep)

    def encodes(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether the gradient of a parameter travels in codes.

        Parameters with one dimension or none do not: biases and norms are few, and one outlier
        among them would take the bits of its neighbours.
        """
        return (
            parameter.dim() > 1
            and parameter.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and not any(part in name for part in self.keep)
        )

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Raises InvalidUsage."""
        del tensor
        raise InvalidUsage(
            "Compression.int8 is for the gradients of a DistributedOptimizer that are summed or "
            "averaged by torch.distributed; elsewhere use Compression.bf16"
        )


class Compression:
    """The available compressors: ``compression=hvd.Compression.bf16``.

    ``int8`` sends about a quarter of the bytes of float32: blocks of 256 gradients with a float32
    scale. Both what a rank sends and the sum have error feedback (guides/fewer-bytes.md).

    With error feedback (``fp16_ef``, ``bf16_ef``) a `DistributedOptimizer` keeps, for each
    parameter, what the cast to 16 bits has lost, and adds it to the next gradient before the cast.
    Over the steps the casts then lose one rounding error, not one a step. The sum over the ranks is
    rounded to 16 bits as well, which no rank can feed back. It costs one tensor of the parameter's
    size, on its device, on each rank. Checkpoints do not hold these tensors: training goes on with
    zeros. Outside of a `DistributedOptimizer`, and with ``op=Adasum``, there is no feedback.

    Source:
        Seide et al., "1-bit stochastic gradient descent", Interspeech 2014.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    fp16_ef = FP16FeedbackCompressor
    bf16_ef = BF16FeedbackCompressor
    int8 = CodedSums()


# What native code does in one pass, for these classes and not for those derived from them.
CASTS_WITH_FEEDBACK = frozenset({FP16FeedbackCompressor, BF16FeedbackCompressor})
CASTS = CASTS_WITH_FEEDBACK | {FP16Compressor, BF16Compressor}
