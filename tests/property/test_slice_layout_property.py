"""How gradient buffers are cut."""

from __future__ import annotations

from itertools import pairwise

from helpers.oracles.split_layouts import can_be_followed
from helpers.property_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order._native._core import Operation, SliceLayout

CUT_ALIGNMENT = 64

tensor_lists = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 2)), max_size=12).map(
    lambda codes: [  # one is called as the slice of the squares is
        (f"t{i}" if i else "squares", 16 * units, buffer) for i, (units, buffer) in enumerate(codes)
    ]
)


@cases(1500, quick=375)
@given(tensors=tensor_lists, slice_bytes=st.integers(64, 4000), small_front=st.booleans())
def test_slices_cover_what_they_promise(
    tensors: list[tuple[str, int, int]], slice_bytes: int, small_front: bool
) -> None:
    layout = SliceLayout(tensors, slice_bytes, small_front)
    slices = layout.slices

    # Tensors lie in their buffer in consumption order, without gaps.
    ends = [0] * len(layout.buffer_bytes)
    for t, (_, size, buffer) in enumerate(tensors):
        assert layout.tensor_offset(t) == ends[buffer]
        ends[buffer] += size
    assert ends == layout.buffer_bytes

    # Slices tile each buffer exactly and in order.
    at = [0] * len(ends)
    for piece in slices:
        assert piece.offset_bytes == at[piece.buffer]
        at[piece.buffer] += piece.size_bytes
    assert at == ends

    # None is larger than asked for.
    assert all(0 < piece.size_bytes <= slice_bytes for piece in slices)
    assert layout.largest_slice_bytes == max((p.size_bytes for p in slices), default=0)

    # Both directions of "slice carries tensor" say what the byte ranges say.
    for s, piece in enumerate(slices):
        end = piece.offset_bytes + piece.size_bytes
        carried = [
            t
            for t, (_, size, buffer) in enumerate(tensors)
            if buffer == piece.buffer
            and layout.tensor_offset(t) < end
            and piece.offset_bytes < layout.tensor_offset(t) + size
        ]
        assert layout.tensors_of(s) == carried
        assert (piece.first_tensor, piece.last_tensor) == (carried[0], carried[-1])
    for t in range(len(tensors)):
        assert layout.slices_of(t) == [s for s in range(len(slices)) if t in layout.tensors_of(s)]

    # What fits one slice is never cut; what does not, shares its slices with nobody.
    for t, (_, size, _) in enumerate(tensors):
        own = layout.slices_of(t)
        assert own == list(range(own[0], own[0] + len(own)))
        if size <= slice_bytes:
            assert len(own) == 1
        else:
            assert all(layout.tensors_of(s) == [t] for s in own)
            assert all(
                (slices[s].offset_bytes - layout.tensor_offset(t)) % CUT_ALIGNMENT == 0 for s in own
            )

    # Fusion is greedy: two whole neighbours of a buffer that would fit one slice are in one. With
    # a small front, a fused slice there is no longer than what is consumed before it.
    for buffer in range(len(ends)):
        row = [s for s, p in enumerate(slices) if p.buffer == buffer]
        for left, right in pairwise(row):
            last_of_left = tensors[slices[left].last_tensor][1]
            first_of_right = tensors[slices[right].first_tensor][1]
            if max(last_of_left, first_of_right) > slice_bytes:
                continue
            if small_front:
                least = max(slice_bytes // 8, CUT_ALIGNMENT)
                limit = min(max(slices[left].offset_bytes, least), slice_bytes)
                assert slices[left].size_bytes + first_of_right > limit
            else:
                assert last_of_left + slices[right].size_bytes > slice_bytes

    for piece in slices:
        if small_front and piece.first_tensor != piece.last_tensor:
            assert piece.size_bytes <= max(piece.offset_bytes, slice_bytes // 8, CUT_ALIGNMENT)

    # Numbers follow consumption order.
    firsts = [p.first_tensor for p in slices]
    assert firsts == sorted(firsts)

    # Names are unique, so that a message that names a slice says which.
    names = [layout.slice_name(s) for s in range(len(slices))]
    assert len(set(names)) == len(names)


@cases(1500, quick=375)
@given(tensors=tensor_lists, slice_bytes=st.integers(64, 4000), small_front=st.booleans())
def test_a_split_layout_is_the_whole_one_twice_and_the_squares(
    tensors: list[tuple[str, int, int]], slice_bytes: int, small_front: bool
) -> None:
    whole = SliceLayout(tensors, slice_bytes, small_front)
    layout = SliceLayout(tensors, slice_bytes, small_front, split=True)
    assert not whole.is_split
    assert whole.squared_tensors == []
    assert layout.is_split == bool(tensors)
    if not tensors:
        assert layout.slices == []
        assert layout.buffer_bytes == []
        return
    slices = layout.slices
    count = len(whole.slices)
    assert [piece.operation for piece in slices] == (
        [Operation.ALL_REDUCE] + count * [Operation.REDUCE_SCATTER] + count * [Operation.ALL_GATHER]
    )
    names = [layout.slice_name(s) for s in range(len(slices))]
    assert len(set(names)) == len(names)
    for i, piece in enumerate(whole.slices):
        for half in (1 + i, 1 + count + i):
            for field in ("buffer", "offset_bytes", "size_bytes", "first_tensor", "last_tensor"):
                assert getattr(slices[half], field) == getattr(piece, field)
            assert layout.tensors_of(half) == whole.tensors_of(i)
            assert names[half].endswith(whole.slice_name(i))
    for t in range(len(tensors)):
        assert layout.tensor_offset(t) == whole.tensor_offset(t)
        own = whole.slices_of(t)
        assert layout.slices_of(t) == [1 + s for s in own] + [1 + count + s for s in own]

    # One float64 a pair of a reduce-scatter and a tensor, in this order.
    pairs = [t for s in range(1, 1 + count) for t in layout.tensors_of(s)]
    assert layout.squared_tensors == pairs
    size = (8 * len(pairs) + 15) // 16 * 16
    assert layout.squares_tensor == len(tensors)
    assert layout.slices_of(layout.squares_tensor) == [0]
    assert layout.tensors_of(0) == [layout.squares_tensor]
    assert layout.buffer_bytes == [*whole.buffer_bytes, size]
    assert (slices[0].buffer, slices[0].offset_bytes) == (len(whole.buffer_bytes), 0)
    assert slices[0].size_bytes == size
    assert layout.largest_slice_bytes == whole.largest_slice_bytes  # squares take no credit

    # The numbers are no plan: the squares are numbered first, but wait for the sums.
    plan = list(range(len(slices)))
    assert not can_be_followed(layout, plan)
    assert can_be_followed(layout, [*plan[1 : 1 + count], 0, *plan[1 + count :]])


@cases(500, quick=125)
@given(tensors=tensor_lists, slice_bytes=st.integers(64, 4000), small_front=st.booleans())
def test_a_sharded_layout_gathers_parameters_in_the_places_of_their_gradients(
    tensors: list[tuple[str, int, int]], slice_bytes: int, small_front: bool
) -> None:
    split = SliceLayout(tensors, slice_bytes, small_front, split=True)
    layout = SliceLayout(tensors, slice_bytes, small_front, split=True, sharded=True)
    assert not split.is_sharded
    assert layout.is_sharded == bool(tensors)
    slices, count = layout.slices, len(layout.slices) // 2
    assert layout.squared_tensors == split.squared_tensors
    assert len({layout.slice_name(s) for s in range(len(slices))}) == len(slices)
    for s, (piece, other) in enumerate(zip(slices, split.slices, strict=True)):
        assert piece.operation == other.operation
        if s > 0:
            assert (piece.buffer, piece.offset_bytes) == (other.buffer, other.offset_bytes)
            assert piece.size_bytes == other.size_bytes
        carried = split.tensors_of(s)
        if s > count:
            carried = [layout.parameter_of(t) for t in carried]
        assert layout.tensors_of(s) == carried
    for t in range(len(tensors)):
        parameter = layout.parameter_of(t)
        assert layout.tensor_offset(parameter) == layout.tensor_offset(t)
        both = split.slices_of(t)
        assert layout.slices_of(t) == both[: len(both) // 2]
        assert layout.slices_of(parameter) == both[len(both) // 2 :]
    if tensors:  # a second float64 for each pair
        size = (16 * len(layout.squared_tensors) + 15) // 16 * 16
        assert layout.buffer_bytes == [*split.buffer_bytes[:-1], size]


@cases(500, quick=125)
@given(
    tensors=tensor_lists, slice_bytes=st.integers(64, 4000), sharded=st.booleans(),
    ranks=st.integers(0, 9),
)  # fmt: skip
def test_maxima_change_the_size_of_the_squares_alone(
    tensors: list[tuple[str, int, int]], slice_bytes: int, sharded: bool, ranks: int
) -> None:
    form = {"split": True, "sharded": sharded}
    without = SliceLayout(tensors, slice_bytes, **form)
    layout = SliceLayout(tensors, slice_bytes, **form, maxima_ranks=ranks)
    if not tensors:
        assert layout.maxima_ranks == 0
        return
    assert layout.maxima_ranks == ranks
    assert SliceLayout(tensors, slice_bytes, maxima_ranks=ranks).maxima_ranks == 0  # no squares
    # Behind the sums of squares, a row of all gradients for each rank.
    squares = (1 + sharded) * len(layout.squared_tensors)
    firsts = [layout.first_maximum(rank) for rank in range(ranks)]
    assert firsts == [squares + rank * len(tensors) for rank in range(ranks)]
    size = (8 * (squares + ranks * len(tensors)) + 15) // 16 * 16
    assert layout.buffer_bytes == [*without.buffer_bytes[:-1], size]
    assert layout.slices[0].size_bytes == size
    assert layout.largest_slice_bytes == without.largest_slice_bytes
    assert layout.squared_tensors == without.squared_tensors
    pairs = zip(layout.slices[1:], without.slices[1:], strict=True)
    for s, (piece, other) in enumerate(pairs, start=1):
        assert layout.slice_name(s) == without.slice_name(s)
        for field in ("buffer", "offset_bytes", "size_bytes", "operation"):
            assert getattr(piece, field) == getattr(other, field)
