"""This rank's shards of one value of a parameter's optimizer state, as torch.distributed.checkpoint
takes them.

torch.distributed.checkpoint asks an object for its boxes (``_Checkpointable``), as it asks a
DTensor. It accepts only tensors as such objects, so this is a tensor without memory of its own.
Boxes are of the parameter's own shape, so a checkpoint does not show how many ranks wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.shards.boxes import Box, boxes_of

__all__: list[str] = []

_aten = torch.ops.aten


class StateShards(torch.Tensor):
    """A tensor of the parameter's shape, of which this rank has some ranges of elements.

    Writing to its boxes writes to `parts`. Other operations raise `InvalidUsage`.

    Attributes:
        parts: the first element's number in memory order, and the elements, 1-d; may be empty.
    """

    parts: list[tuple[int, torch.Tensor]]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        strides: Sequence[int],
        parts: Sequence[tuple[int, torch.Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> StateShards:
        """Joins ranges of elements.

        Args:
            shape, strides: of the parameter as its elements travel; in elements.
            parts: see the attribute; kept, not copied.
            dtype, device: of the parts, also if there are none.
        """
        shards: StateShards = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), strides=tuple(strides), dtype=dtype, device=device
        )
        shards.parts = list(parts)
        return shards

    def part(self, begin: int, end: int) -> torch.Tensor | None:
        """The elements of this range, 1-d; None if the parts were cut elsewhere."""
        for first, values in self.parts:
            if (first, first + values.numel()) == (begin, end):
                return values
        return None

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Each box of this rank's elements, with a view of them in the box's shape."""
        strides = self.stride()
        for begin, values in self.parts:
            step = values.stride(0)
            for box in boxes_of(self.shape, strides, begin, begin + values.numel()):
                first = sum(o * s for o, s in zip(box.offsets, strides, strict=True)) - begin
                yield (
                    box,
                    values.as_strided(
                        box.sizes,
                        tuple(stride * step for stride in strides),
                        values.storage_offset() + first * step,
                    ),
                )

    # ---- what torch.distributed.checkpoint calls ----------------------------------------------

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        """What to write: one item for each box."""
        # Imported when it is there already: it takes long.
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import (
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """What to read: all boxes."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box, _ in self.boxes()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """The elements of one box."""
        for box, values in self.boxes():
            if box.offsets == tuple(index.offset):
                return values
        raise ValueError(f"no shard of '{index.fqn}' begins at {tuple(index.offset)} on this rank")

    # ---- copies -------------------------------------------------------------------------------

    def _with(self, parts: Sequence[tuple[int, torch.Tensor]]) -> StateShards:
        return StateShards(self.shape, self.stride(), parts, self.dtype, self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateShards:
        copied = memo[id(self)] = self._with([(b, values.clone()) for b, values in self.parts])
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return StateShards, (
            tuple(self.shape), self.stride(), self.parts, self.dtype, self.device,
        )  # fmt: skip

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> StateShards:
        own, device = args[0], (kwargs or {}).get("device")
        if function is _aten.detach.default:
            return own._with(own.parts)  # type: ignore[no-any-return]
        if function is _aten.clone.default:
            return own._with([(b, values.clone()) for b, values in own.parts])  # type: ignore[no-any-return]
        # Asynchronous saves make a copy by one of these, and fill it.
        if function is _aten.new_empty.default:
            return StateShards(own.shape, own.stride(), (), own.dtype, device or own.device)
        if function is _aten.zeros_like.default:
            parts = [(b, torch.zeros_like(values, device=device)) for b, values in own.parts]
            return StateShards(own.shape, own.stride(), parts, own.dtype, device or own.device)
        if function is _aten.copy_.default and all(isinstance(s, StateShards) for s in args[:2]):
            for (_, to), (_, values) in zip(own.parts, args[1].parts, strict=True):
                to.copy_(values)
            return own  # type: ignore[no-any-return]
        raise InvalidUsage(
            f"{function} needs all elements, but these are shards of optimizer state for "
            "torch.distributed.checkpoint, of which this rank has some; state_dict() has all"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        ranges = [f"{begin}:{begin + values.numel()}" for begin, values in self.parts]
        return f"StateShards(shape={tuple(self.shape)}, {self.dtype}, elements {ranges})"
