"""Checks that the ranks train the same model in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from hvd_order.base.errors import InvalidUsage, ModelMismatch, RanksDiffer

__all__ = [
    "check_same",
    "check_same_optimizer",
    "check_same_settings",
    "first_difference",
    "name_ranks",
]

Value = TypeVar("Value")


def check_same(
    everyone: Sequence[Sequence[tuple[str, tuple[int, ...], str]]], ranks: Sequence[int]
) -> None:
    """Raises ModelMismatch unless all ranks list the same (name, shape, dtype), in any order."""
    first = {name: (shape, dtype) for name, shape, dtype in everyone[0]}
    for rank, parameters in zip(ranks[1:], everyone[1:], strict=True):
        other = {name: (shape, dtype) for name, shape, dtype in parameters}
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise ModelMismatch(
                    f"the ranks train different models: parameter '{name}' is "
                    f"{_describe(first.get(name))} on rank {ranks[0]} and "
                    f"{_describe(other.get(name))} on rank {rank} "
                    f"(rank {ranks[0]} has {len(first)} parameters, rank {rank} has "
                    f"{len(other)}); build the same model on every rank"
                )


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns text such as "rank 3" or "ranks 0, 2"; of more than 8 ranks only the first 8."""
    word = "rank" if len(ranks) == 1 else "ranks"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{word} {shown}"


def check_same_optimizer(everyone: Mapping[int, Mapping[str, str]]) -> None:
    """Raises RanksDiffer unless all ranks describe their optimizers alike.

    Args:
        everyone: each rank's description by item, such as "lr of group 0": "0.1".
    """
    difference = first_difference(everyone)
    if difference is not None:
        what, sides = difference
        told = "; ".join(f"{value or 'missing'} on {who}" for value, who in sides.items())
        raise RanksDiffer(
            f"the ranks' optimizers differ in {what}: {told}. Make the optimizer, and change it, "
            "in the same way on every rank; after loading a checkpoint on one rank call "
            "broadcast_optimizer_state(optimizer, root_rank=...)"
        )


def check_same_settings(
    everyone: Mapping[int, Mapping[str, str]],
    cure: str = "set it to the same value on every rank, or nowhere (documentation: Settings)",
) -> None:
    """Raises InvalidUsage unless all ranks have the same settings.

    Args:
        everyone: each rank's settings, such as "HVD_ORDER_TUNE": "1".
        cure: advice for the message.
    """
    difference = first_difference(everyone)
    if difference is not None:
        what, sides = difference
        told = ", ".join(f"{value or 'not set'} on {who}" for value, who in sides.items())
        raise InvalidUsage(f"the ranks differ in {what}: {told}; {cure}")


def first_difference(
    everyone: Mapping[int, Mapping[str, Value]],
) -> tuple[str, dict[Value | None, str]] | None:
    """Finds the first item that differs between ranks, in the order of the first rank.

    Returns:
        The item, and for each of its values the ranks that have it ("ranks 0, 2"); None: no item
        differs.
    """
    for what in dict.fromkeys(item for items in everyone.values() for item in items):
        ranks: dict[Value | None, list[int]] = {}
        for rank, items in everyone.items():
            ranks.setdefault(items.get(what), []).append(rank)
        if len(ranks) > 1:
            return what, {value: name_ranks(of_value) for value, of_value in ranks.items()}
    return None


def _describe(parameter: tuple[tuple[int, ...], str] | None) -> str:
    if parameter is None:
        return "missing"
    shape, dtype = parameter
    return f"{dtype} of shape {list(shape)}"
