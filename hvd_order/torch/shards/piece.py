"""The pieces of parameters that this rank updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvd_order._native import _torch as native
from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []

_NARROW = {torch.bfloat16, torch.float16}


@dataclass(eq=False)
class Piece:
    """A range of a parameter's elements within this rank's shard of one slice.

    Attributes:
        entry: of the parameter.
        begin, end: the range, in the order in which the elements travel.
        wire: the range in the buffer, 1-d. It has the sum of the gradients after the first half,
            and then the updated elements.
        values: what the optimizer updates, 1-d. Between steps it has elements only if it is a
            master copy.
        has_master: `values` is a master copy that a step has filled.
    """

    entry: ParameterEntry
    begin: int
    end: int
    wire: torch.Tensor
    values: torch.nn.Parameter
    has_master: bool = False

    @property
    def is_master(self) -> bool:
        """Whether `values` are float32 master copies of 16-bit elements."""
        return self.values.dtype != self.wire.dtype


def pieces_of(
    entries: Sequence[ParameterEntry],
    buffers: Sequence[torch.Tensor],
    layout: native.SliceLayout,
    rank: int,
    size: int,
) -> list[Piece]:
    """Cuts this rank's shards of all slices into pieces.

    Args:
        entries: by TensorId.
        buffers: 1-d, by BufferId.
        layout: a sharded one.
        rank, size: within the ranks that exchange gradients.
    """
    pieces = []
    for index, slice_ in enumerate(layout.slices):
        if slice_.operation != native.Operation.REDUCE_SCATTER:
            continue
        buffer = buffers[slice_.buffer]
        element = buffer.element_size()
        begin, length = native.shard_of(slice_.size_bytes // element, rank, size)
        begin += slice_.offset_bytes // element
        for tensor in layout.tensors_of(index):
            entry = entries[tensor]
            first = layout.tensor_offset(tensor) // element
            start = max(begin, first)
            stop = min(begin + length, first + entry.parameter.numel())
            if entry.parameter.numel() == 0 and rank == 0:  # its state has no elements either
                pieces.append(Piece(entry, 0, 0, buffer[first:first], _values(buffer[first:first])))
            elif start < stop:
                wire = buffer[start:stop]
                pieces.append(Piece(entry, start - first, stop - first, wire, _values(wire)))
    return pieces


def _values(wire: torch.Tensor) -> torch.nn.Parameter:
    # NaN differs from every element, so the first step takes the parameter's.
    narrow = wire.dtype in _NARROW
    values = torch.full_like(wire, torch.nan, dtype=torch.float32) if narrow else wire.new_empty(0)
    return torch.nn.Parameter(values, requires_grad=False)


def in_wire_order(tensor: torch.Tensor, wire: torch.Tensor) -> torch.Tensor:
    """The elements of ``tensor`` in the order in which ``wire``, of the same shape, is stored.

    Returns:
        1-d; a view if ``tensor`` is stored in that order.
    """
    if tensor.stride() != wire.stride():
        ordered = torch.empty_strided(
            wire.shape, wire.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def in_own_order(flat: torch.Tensor, wire: torch.Tensor) -> torch.Tensor:
    """The inverse of `in_wire_order`: a tensor of the shape and strides of ``wire``."""
    return flat.as_strided(wire.shape, wire.stride())
