"""What is sent in place of a tensor: the tensor itself, 16 bits an element, or codes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_order.base.coded_sums import CodesOfGradients

__all__ = ["Compression", "Compressor", "TensorFlowCodedSums"]


class Compressor:
    """Horovod's interface; derive from it and pass the class as ``compression=``."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor to send, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Restores the tensor from the received one."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """`tensor` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """`tensor` itself."""
        return tensor


class _CastCompressor(Compressor):
    """Casts wider floating point tensors to `wire`; integers and narrow floats stay."""

    wire = tf.float16

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Returns the cast `tensor` and its original dtype."""
        if tensor.dtype.is_floating and tensor.dtype.size > cls.wire.size:
            return tf.cast(tensor, cls.wire), tensor.dtype
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Casts `tensor` to its original dtype."""
        return tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Sends float32 and float64 as float16: half the bytes, 11 bits, largest value 65504."""


class BF16Compressor(_CastCompressor):
    """Sends float32 and float64 as bfloat16: half the bytes, 8 bits, the range of float32."""

    wire = tf.bfloat16


class TensorFlowCodedSums(CodesOfGradients, Compressor):
    """Sends codes of gradients, and adds up float32."""


class Compression:
    """The choices for ``compression=``.

    ``fp16`` and ``bf16`` cast what is sent. ``fp16_ef``, ``bf16_ef`` and ``int8`` send codes of the
    gradients of an optimizer or a tape, add up float32, and feed back what codes lack
    (guides/fewer-bytes.md). ``auto`` is for PyTorch; here it is an error that says so.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    fp16_ef = TensorFlowCodedSums("float16")
    bf16_ef = TensorFlowCodedSums("bfloat16")
    int8 = TensorFlowCodedSums("int8")
    auto = TensorFlowCodedSums("int8", chooses=True)
