"""Which gradients travel in codes, for every framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from hvd_order.base.errors import InvalidUsage

__all__ = ["CodedFormat", "CodesOfGradients", "check_coded"]

CodedFormat = Literal["int8", "bfloat16", "float16"]
_Self = TypeVar("_Self", bound="CodesOfGradients")


class CodesOfGradients:
    """Fewer bits on the wire, and sums in float32 (csrc/torch/cuda/codes.h).

    Each rank adds up its share of the decoded gradients in the order of the ranks, and encodes the
    sum once. Only a `DistributedOptimizer` whose sums torch.distributed makes does this.

    Attributes:
        format: of what travels: ``"int8"``, ``"bfloat16"`` or ``"float16"``.
        keep: parameters that travel exactly, as parts of their names.
        chooses: only gradients on which the step waits for the link travel so.
    """

    def __init__(
        self, format_: CodedFormat, keep: Iterable[str] = (), chooses: bool = False
    ) -> None:
        """Takes what its attributes say.

        Raises:
            ValueError: one of those is not text.
        """
        self.format = format_
        self.chooses = chooses
        self.keep = (keep,) if isinstance(keep, str) else tuple(keep)
        if not all(isinstance(part, str) for part in self.keep):
            raise ValueError(f"keep= takes parts of parameters' names, not {list(self.keep)}")

    def __call__(self: _Self, keep: Iterable[str] = ()) -> _Self:
        """The same with exceptions: ``Compression.int8(keep=["router"])``."""
        return type(self)(self.format, keep, self.chooses)

    def format_of(self, name: str, dimensions: int, dtype: str) -> str:
        """The format of what travels of a parameter's gradient; empty: the gradient itself.

        Parameters with one dimension or none do not travel in 8 bits: biases and norms are few, and
        one outlier among them would take the bits of its neighbours.

        Args:
            name, dimensions: of the parameter.
            dtype: of the gradient.
        """
        if self.format == "int8":
            can = dimensions > 1 and dtype in ("float32", "bfloat16", "float16")
        else:
            can = dtype == "float32"
        return self.format if can and not any(part in name for part in self.keep) else ""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Raises InvalidUsage."""
        del tensor
        raise InvalidUsage(
            "Compression.int8, auto, bf16_ef and fp16_ef are for the gradients of a "
            "DistributedOptimizer that are summed or averaged by torch.distributed; elsewhere use "
            "Compression.bf16"
        )


def check_coded(is_adasum: bool, is_allreduce: bool) -> None:
    """Refuses what sums of encoded gradients cannot be combined with."""
    if is_adasum:
        raise InvalidUsage(
            "Compression.int8, bf16_ef and fp16_ef need sums or averages; Adasum has none. Use "
            "Compression.bf16"
        )
    if not is_allreduce:
        raise InvalidUsage(
            "Compression.int8, bf16_ef and fp16_ef need all-reduces; parameter servers take "
            "Compression.bf16 or none"
        )
