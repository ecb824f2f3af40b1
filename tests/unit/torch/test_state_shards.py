"""Shards of one value of the optimizer state, as an object."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.shards.state_shards import StateShards


def shards_of(values: torch.Tensor) -> StateShards:
    """Elements 2 to 5 and 9 to 16 of a tensor of 3 x 4 x 2 whose second dimension is innermost."""
    like = torch.empty(3, 2, 4).transpose(1, 2)
    parts = [(2, values[:3]), (9, values[3:10])]
    return StateShards(like.shape, like.stride(), parts, values.dtype, values.device)


def test_boxes_show_the_elements() -> None:
    values = torch.arange(10.0)
    shards = shards_of(values)
    assert shards.size() == (3, 4, 2)
    whole = torch.full((24,), torch.nan)
    in_shape = whole.as_strided(shards.shape, shards.stride())
    for box, view in shards.boxes():
        assert view.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        part = in_shape
        for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dimension, offset, size)
        part.copy_(view)
    expected = [*[None] * 2, 0, 1, 2, *[None] * 4, 3, 4, 5, 6, 7, 8, 9, *[None] * 8]
    assert [None if x != x else int(x) for x in whole.tolist()] == expected


def test_copies_have_their_own_memory() -> None:
    values = torch.arange(10.0)
    shards = shards_of(values)
    filled = torch.zeros_like(shards, device="cpu").copy_(shards, non_blocking=True)
    pickled = pickle.loads(pickle.dumps(shards))
    for other in (copy.deepcopy(shards), shards.clone(), pickled, filled):
        assert type(other) is StateShards
        assert other.size() == shards.size()
        assert other.stride() == shards.stride()
        part = other.part(9, 16)
        assert part is not None
        assert torch.equal(part, values[3:])
        part.zero_()
        assert other.part(9, 15) is None
    assert torch.equal(values, torch.arange(10.0))


def test_says_what_it_is() -> None:
    shards = shards_of(torch.arange(10.0))
    assert repr(shards) == ("StateShards(shape=(3, 4, 2), torch.float32, elements ['2:5', '9:16'])")
    for use in (shards.sum, lambda: torch.empty(3, 4, 2).copy_(shards)):
        with pytest.raises(InvalidUsage, match=r"which this rank has some; state_dict\(\) has all"):
            use()
    with pytest.raises(ValueError, match="no shard of 'w' begins at"):
        shards.__get_tensor_shard__(type("Index", (), {"fqn": "w", "offset": (2, 3, 1)}))
