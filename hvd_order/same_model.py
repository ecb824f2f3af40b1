"""Whether the ranks train the same model."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_order.errors import ModelMismatch

__all__ = ["check_same"]


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


def _describe(parameter: tuple[tuple[int, ...], str] | None) -> str:
    if parameter is None:
        return "missing"
    shape, dtype = parameter
    return f"{dtype} of shape {list(shape)}"
