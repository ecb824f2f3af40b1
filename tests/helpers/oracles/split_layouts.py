"""What the slices of a layout wait for, told without the classes under test.

Of a layout whose all-reduces are split, an all-gather waits for the reduce-scatter of the same
bytes, and the squares wait for all reduce-scatters. Of a sharded one, an all-gather waits for
tensors of its own, the parameters, which a rank may update after the squares only.
"""

from __future__ import annotations

from helpers.property_cases import Choices

from hvd_order._native._core import Operation, SliceLayout


def is_gather(layout: SliceLayout, slice_: int) -> bool:
    """Whether the slice is the second half of an all-reduce."""
    return layout.slices[slice_].operation.value == Operation.ALL_GATHER.value


def is_squares(layout: SliceLayout, slice_: int) -> bool:
    """Whether the slice is the squares, which take no credit."""
    return layout.is_split and layout.tensors_of(slice_) == [layout.squares_tensor]


def waits_for(layout: SliceLayout, for_plan: bool = False) -> list[set[int]]:
    """Returns for each slice the slices that must be done before it is ready.

    Args:
        for_plan: also those that must be done before its tensors are ready.
    """
    slices = layout.slices
    kinds = [piece.operation.value for piece in slices]
    places = [(piece.buffer, piece.offset_bytes) for piece in slices]
    sums = {
        place: s
        for s, (kind, place) in enumerate(zip(kinds, places, strict=True))
        if kind == Operation.REDUCE_SCATTER.value
    }
    return [
        ({0} if for_plan else set())
        if kind == Operation.ALL_GATHER.value and layout.is_sharded
        else {sums[place]}
        if kind == Operation.ALL_GATHER.value
        else set(sums.values())
        if kind == Operation.ALL_REDUCE.value
        else set()
        for kind, place in zip(kinds, places, strict=True)
    ]


def can_be_followed(layout: SliceLayout, plan: list[int]) -> bool:
    """Whether the plan has each slice once, after all that it waits for."""
    place = {slice_: i for i, slice_ in enumerate(plan)}
    return sorted(plan) == list(range(len(layout.slices))) and all(
        place[before] < place[slice_]
        for slice_, needed in enumerate(waits_for(layout, for_plan=True))
        for before in needed
    )


def any_plan(layout: SliceLayout, chance: Choices) -> list[int]:
    """Returns an order that can be followed."""
    needed = waits_for(layout, for_plan=True)
    rest = list(range(len(needed)))
    plan: list[int] = []
    while rest:
        due = [slice_ for slice_ in rest if needed[slice_].issubset(plan)]
        plan.append(chance.one_of(due))
        rest.remove(plan[-1])
    return plan
