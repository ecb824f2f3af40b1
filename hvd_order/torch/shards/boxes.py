"""Boxes of a tensor's shape that hold a range of its elements in memory order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__: list[str] = []


@dataclass(frozen=True)
class Box:
    """A part of a tensor that is a range of indices in every dimension.

    Attributes:
        offsets: the first index, by dimension.
        sizes: the number of indices, by dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes_of(shape: Sequence[int], strides: Sequence[int], begin: int, end: int) -> list[Box]:
    """Cuts a range of elements into boxes.

    Args:
        shape, strides: of a tensor that fills its memory without gaps; in elements.
        begin, end: the range, in the order in which the elements are stored.

    Returns:
        Disjoint boxes in memory order, ``2 * len(shape) - 1`` at most (one without dimensions).
    """
    # The stride of a dimension of one index means nothing.
    order = sorted(range(len(shape)), key=lambda d: (shape[d] > 1, -strides[d]))
    stored = [shape[d] for d in order]
    found = []
    for box in _boxes(stored, begin, end):
        offsets, sizes = [0] * len(shape), [0] * len(shape)
        for place, dimension in enumerate(order):
            offsets[dimension], sizes[dimension] = box.offsets[place], box.sizes[place]
        found.append(Box(tuple(offsets), tuple(sizes)))
    return found


def _boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The same for a tensor whose last dimension is stored innermost."""
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, last = begin // row, (end - 1) // row
    if first == last and (begin, end) != (first * row, (first + 1) * row):
        yield from _in_row(inner, first, begin - first * row, end - first * row)
        return
    whole_from, whole_to = -(-begin // row), end // row
    if whole_from * row > begin:
        yield from _in_row(inner, first, begin - first * row, row)
    if whole_from < whole_to:
        yield Box((whole_from, *(0 for _ in inner)), (whole_to - whole_from, *inner))
    if whole_to * row < end:
        yield from _in_row(inner, last, 0, end - last * row)


def _in_row(inner: Sequence[int], row: int, begin: int, end: int) -> Iterator[Box]:
    for box in _boxes(inner, begin, end):
        yield Box((row, *box.offsets), (1, *box.sizes))
