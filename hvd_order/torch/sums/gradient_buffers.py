"""Flat gradient buffers in consumption order, cut into slices.

Every tensor's place in its buffer ends with one spare element, its *use flag*: 1 on a rank that
contributes a gradient, 0 on one that does not. The flag is summed with the gradient, so a rank
needs no further message to determine whether any rank used the parameter.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from hvd_order._native import _torch as native
from hvd_order.torch.collectives.compression import (
    CASTS,
    CodedSums,
    Compressor,
)
from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []

_SQUARED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_ALIGNMENT_BYTES = 64  # cache line; more than any dtype and SliceLayout need
MOST_MAXIMA_BYTES = 1 << 20  # all ranks wait for them in every step


class GradientBuffers:
    """The buffers of one model.

    Attributes:
        layout: places and slices.
        flat: one 1-d tensor for each (device, dtype), by BufferId.
        squares: float64, sums of squares and maxima by place (SliceLayout), if all-reduces are
            split.
        formats: how gradients travel, by TensorId; empty: as they are.
        residuals: float32, by BufferId: what this rank still owes to the sum of each element, if
            gradients are encoded.
    """

    def __init__(
        self,
        entries: Sequence[ParameterEntry],
        compression: type[Compressor] | Compressor,
        slice_bytes: int,
        small_front: bool = True,
        sharded: bool = False,
        maxima_ranks: int = 0,
    ) -> None:
        """Lays out ``entries``, which come in consumption order, and points each at its place.

        All-reduces are whole until `recut`, unless they are sharded.

        Args:
            slice_bytes, small_front: as in SliceSettings.
            sharded, maxima_ranks: as in SliceLayout.
        """
        self._casts = compression in CASTS
        samples = [_wire_sample(entry.parameter, compression) for entry in entries]
        kinds: dict[tuple[torch.device, torch.dtype], int] = {}
        tensors = []
        for entry, sample in zip(entries, samples, strict=True):
            buffer = kinds.setdefault((entry.parameter.device, sample.dtype), len(kinds))
            size = (sample.numel() + 1) * sample.element_size()
            size = (size + _ALIGNMENT_BYTES - 1) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
            tensors.append((entry.name, size, buffer))
        self._tensors = tensors
        self.squares: torch.Tensor | None = None
        self.layout = native.SliceLayout(tensors, slice_bytes, small_front)
        self.flat = [
            torch.zeros(size_bytes // dtype.itemsize, dtype=dtype, device=device)
            for (device, dtype), size_bytes in zip(kinds, self.layout.buffer_bytes, strict=True)
        ]
        self.formats: list[native.WireFormat] = []
        self.residuals: list[torch.Tensor] = []
        self._sharded = sharded
        if sharded:
            self.recut(slice_bytes, small_front, split=True, maxima_ranks=maxima_ranks)
        flags: list[list[int]] = [[] for _ in self.flat]
        self._samples = samples
        for tensor, (entry, sample) in enumerate(zip(entries, samples, strict=True)):
            entry.tensor = tensor
            self.put_in_place(entry)
            end = self._offset(entry) + tensors[tensor][1] // sample.element_size() - 1
            entry.use_flag = self.flat[tensors[tensor][2]][end : end + 1]
            flags[tensors[tensor][2]].append(end)
        self._flags = [
            torch.tensor(places, device=flat.device)
            for places, flat in zip(flags, self.flat, strict=True)
        ]

    @property
    def devices(self) -> frozenset[torch.device]:
        """The devices of the buffers."""
        return frozenset(flat.device for flat in self.flat)

    def _offset(self, entry: ParameterEntry) -> int:
        """Offset of the entry in its buffer, in elements."""
        sample = self._samples[entry.tensor]
        return self.layout.tensor_offset(entry.tensor) // sample.element_size()

    def put_in_place(self, entry: ParameterEntry) -> None:
        """Points ``entry`` at its place, also if the program has moved its gradient."""
        sample = self._samples[entry.tensor]
        entry.wire = self._place(entry)
        dtype = native.gradient_dtype(entry.parameter)
        same = sample.dtype == dtype and sample.shape == entry.parameter.shape
        entry.on_wire = same
        entry.casts = self._casts and not same
        entry.on_device = entry.wire.device.type != "cpu"
        entry.gradient = self._new_gradient(entry)

    def encode(
        self, entries: Sequence[ParameterEntry], format_: native.WireFormat, names: Container[str]
    ) -> None:
        """Sets which gradients travel in a format; all others travel as they are.

        Residuals are made at the first call, and take over what their entries have owed so far.

        Args:
            entries: by TensorId.
            names: of their parameters.
        """
        exact = native.WireFormat.EXACT
        self.formats = [format_ if entry.name in names else exact for entry in entries]
        if self.residuals:
            return
        self.residuals = [torch.zeros_like(flat, dtype=torch.float32) for flat in self.flat]
        for entry in entries:
            sample = self._samples[entry.tensor]
            flat = self.residuals[self._tensors[entry.tensor][2]]
            place = native.place_in(flat, sample.shape, sample.stride(), self._offset(entry))
            if entry.residual is not None and entry.residual.shape == place.shape:
                place.copy_(entry.residual)
            entry.residual = place

    def sum_of(self, entry: ParameterEntry) -> torch.Tensor:
        """The elements of a gradient's place, 1-d in the order of memory."""
        sample, first = self._samples[entry.tensor], self._offset(entry)
        return self.flat[self._tensors[entry.tensor][2]][first : first + sample.numel()]

    def leave_to_program(self, entry: ParameterEntry) -> None:
        """Gives the entry another tensor as its gradient, in the same place, if the program has
        taken the one before, which keeps its elements.
        """
        if entry.gradient_is_held:
            if entry.on_wire:
                native.move_out(entry.gradient)
            entry.gradient = self._new_gradient(entry)

    def _new_gradient(self, entry: ParameterEntry) -> torch.Tensor:
        if entry.on_wire:
            return self._place(entry)
        return torch.zeros_like(entry.parameter, dtype=native.gradient_dtype(entry.parameter))

    def _place(self, entry: ParameterEntry) -> torch.Tensor:
        sample = self._samples[entry.tensor]
        flat = self.flat[self._tensors[entry.tensor][2]]
        return native.place_in(flat, sample.shape, sample.stride(), self._offset(entry))

    def recut(
        self,
        slice_bytes: int,
        small_front: bool,
        split: bool,
        maxima_ranks: int = 0,
        by_need: bool = False,
    ) -> None:
        """Cuts the same places into other slices.

        Args:
            slice_bytes, small_front, split: as in SliceSettings; only `can_be_split` buffers can.
            maxima_ranks, by_need: as in SliceLayout.
        """
        self.layout = native.SliceLayout(
            self._tensors, slice_bytes, small_front, split, self._sharded, maxima_ranks, by_need
        )
        self.squares = None
        if split:
            (device,) = self.devices
            size = self.layout.buffer_bytes[-1] // torch.float64.itemsize
            self.squares = torch.zeros(size, dtype=torch.float64, device=device)
            self._squared = torch.tensor(self.layout.squared_tensors, device=device)

    @property
    def can_be_split(self) -> bool:
        """Whether sums of squares can be computed, in one buffer."""
        dtypes = {flat.dtype for flat in self.flat}
        return len(self.devices) == 1 and dtypes <= _SQUARED

    @property
    def registered(self) -> list[torch.Tensor]:
        """All buffers that the engine sends, by BufferId."""
        return self.flat if self.squares is None else [*self.flat, self.squares]

    def two_norms(self, factor: float) -> torch.Tensor:
        """The 2-norms of the sums, float64, by TensorId, once the squares have arrived.

        Args:
            factor: of all sums.
        """
        return self._by_tensor(0).sqrt_().mul_(abs(factor))

    @property
    def has_maxima(self) -> bool:
        """Whether the infinity norms of the sums arrive with the squares."""
        return self.squares is not None and self.layout.maxima_ranks > 0

    def _maxima(self) -> torch.Tensor:
        """The places of the maxima, by rank and TensorId."""
        assert self.squares is not None
        ranks, gradients = self.layout.maxima_ranks, len(self._tensors)
        first = self.layout.first_maximum(0)
        return self.squares[first : first + ranks * gradients].view(ranks, gradients)

    def clear_maxima(self) -> None:
        """Sets the maxima to zero, before the first sum of a step."""
        with torch.no_grad():
            self._maxima().zero_()

    def infinity_norms(self, factor: float, dtype: torch.dtype) -> torch.Tensor:
        """The infinity norms of the sums, by TensorId, once the squares have arrived.

        Equal to those of the elements in every bit.

        Args:
            factor: of all sums.
            dtype: of the gradients, to which products are rounded.
        """
        return self._maxima().amax(0).to(dtype).mul_(factor).abs_()

    def used(self) -> list[bool]:
        """Whether any rank had a gradient, by TensorId, once the squares have arrived.

        Only for sharded all-reduces: later the use flags themselves are there.
        """
        return (self._by_tensor(len(self._squared)) > 0).tolist()

    def _by_tensor(self, first: int) -> torch.Tensor:
        """The sums of the squares from place `first` on, by TensorId."""
        assert self.squares is not None
        sums = torch.zeros(len(self._tensors), dtype=torch.float64, device=self._squared.device)
        of_pairs = self.squares[first : first + len(self._squared)]
        return sums.index_add_(0, self._squared, of_pairs)

    def raise_use_flags(self) -> None:
        """Sets every use flag to 1. The buffers must be idle."""
        with torch.no_grad():
            for flat, places in zip(self.flat, self._flags, strict=True):
                flat.index_fill_(0, places, 1)


def _wire_sample(
    parameter: torch.Tensor, compression: type[Compressor] | Compressor
) -> torch.Tensor:
    """How a gradient of ``parameter`` is sent, without data: shape, stride, dtype."""
    # empty_like keeps the strides of dense tensors (channels_last) and makes others contiguous
    shape = torch.empty_like(
        parameter, dtype=native.gradient_dtype(parameter), device="meta", requires_grad=False
    )
    return shape if isinstance(compression, CodedSums) else compression.compress(shape)[0]
