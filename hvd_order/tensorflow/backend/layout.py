"""Layout of an exchange's gradients in gradient buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvd_order.tensorflow.backend.interface import Gradient

__all__ = ["Arrangement"]

_ALIGNMENT_BYTES = 64  # cache line; more than SliceLayout needs


@dataclass(frozen=True)
class Arrangement:
    """Gradients in order of urgency, with one buffer for each dtype.

    Attributes:
        positions: place of each gradient in the exchange, by its number in the engine.
        tensors: (name, padded size in bytes, buffer) of each gradient, for ``SliceLayout``.
        sizes: sizes in bytes without padding.
        dtypes: dtypes of the buffers.
    """

    positions: list[int]
    tensors: list[tuple[str, int, int]]
    sizes: list[int]
    dtypes: list[str]

    @classmethod
    def of(
        cls,
        gradients: Sequence[Gradient],
        positions: Sequence[int],
        item_bytes: Callable[[str], int],
    ) -> Arrangement:
        """Lays out the gradients in the order of `positions`.

        Args:
            gradients: all gradients of the exchange.
            positions: the order, as indices into `gradients`.
            item_bytes: returns the size of an element of a dtype.
        """
        buffers: dict[str, int] = {}
        tensors, sizes = [], []
        for one in (gradients[position] for position in positions):
            buffer = buffers.setdefault(one.dtype, len(buffers))
            item = item_bytes(one.dtype)
            size_bytes = math.prod(one.shape) * item
            # The transport takes the last element of each place for a use flag.
            padded = -(-(size_bytes + item) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            sizes.append(size_bytes)
            tensors.append((one.name, padded, buffer))
        return cls(list(positions), tensors, sizes, list(buffers))

    @property
    def size_bytes(self) -> int:
        """Total size of all buffers."""
        return sum(padded for _, padded, _ in self.tensors)

    def places(
        self, address_of: Callable[[int], int], offset_of: Callable[[int], int]
    ) -> list[tuple[str, int, int, int]]:
        """(name, tensor, address, size in bytes) by position, for ``OpGradientQueue``.

        Args:
            address_of: returns the address of a buffer.
            offset_of: returns the offset of a tensor in its buffer.
        """
        places: list[tuple[str, int, int, int]] = [("", 0, 0, 0)] * len(self.positions)
        for tensor, position in enumerate(self.positions):
            name, _, buffer = self.tensors[tensor]
            address = address_of(buffer) + offset_of(tensor)
            places[position] = (name, tensor, address, self.sizes[tensor])
        return places
