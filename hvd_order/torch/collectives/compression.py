"""What is sent in place of a tensor: the tensor itself, or 16 bits an element."""

from __future__ import annotations

from typing import Any

import torch

from hvd_order.base.coded_sums import CodesOfGradients

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


class CodedSums(CodesOfGradients, Compressor):
    """Sends codes of gradients, and adds up float32."""


class Compression:
    """The available compressors: ``compression=hvd.Compression.bf16``.

    ``fp16`` and ``bf16`` cast what is sent, and the ranks add up 16-bit numbers.

    ``fp16_ef``, ``bf16_ef`` and ``int8`` send codes, add up float32, and have *error feedback* at
    both ends: what a code lacks of a gradient, or of a sum, is added to the next one
    (guides/fewer-bytes.md). Over the steps they lose one rounding error, not one a step. ``int8``
    sends 8.125 bits for each element of parameters with two dimensions or more. ``auto`` sends
    those of them so on which the step waits for the link, if trials on real steps find that it
    helps. Feedback costs four bytes for each element, on its device, on each rank. Checkpoints do
    not hold them: training goes on with zeros.

    Source:
        Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Tang et al.,
        "DoubleSqueeze", ICML 2019.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    fp16_ef = CodedSums("float16")
    bf16_ef = CodedSums("bfloat16")
    int8 = CodedSums("int8")
    auto = CodedSums("int8", chooses=True)


# What native code does in one pass, for these classes and not for those derived from them.
CASTS = frozenset({FP16Compressor, BF16Compressor})
