"""Boxes hold the range of elements that they were cut from, each once."""

from __future__ import annotations

import math

import torch
from helpers.property_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.torch.shards.boxes import boxes_of


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Shape and strides of a tensor whose dimensions are stored in any order, and a range of it."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    strides, stride = [0] * len(shape), 1
    for dimension in order:
        # The stride of one index may be anything.
        strides[dimension] = stride if shape[dimension] > 1 else draw(st.integers(0, 99))
        stride *= max(shape[dimension], 1)
    begin = draw(st.integers(0, math.prod(shape)))
    return shape, strides, begin, draw(st.integers(begin, math.prod(shape)))


@cases(1500, quick=375)
@given(case=ranges())
def test_boxes_hold_the_range(case: tuple[list[int], list[int], int, int]) -> None:
    shape, strides, begin, end = case
    found = boxes_of(shape, strides, begin, end)
    assert len(found) <= max(2 * len(shape) - 1, 1)
    held = []
    numbers = torch.arange(math.prod(shape))
    for box in found:
        for offset, size, whole in zip(box.offsets, box.sizes, shape, strict=True):
            assert 0 <= offset < offset + size <= whole
        if shape:
            part = torch.as_strided(numbers, shape, strides)
            for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dimension, offset, size)
        else:
            part = numbers
        held += part.flatten().tolist()
    assert sorted(held) == list(range(begin, end))
