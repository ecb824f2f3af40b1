"""The state of a sharded optimizer as a whole: gathered, cut, and moved between ranks.

State is moved a few parameters at a time, so that no rank has much more than its shards of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.shards.piece import Piece, in_own_order, in_wire_order

__all__: list[str] = []

# What all ranks give, by rank.
Gather = Callable[[Any], list[Any]]
# The state of one parameter: what is by element is 1-d, in wire order.
Whole = tuple[ParameterEntry, dict[str, Any]]

MASTER = "master"  # float32 master copies among the state of a parameter
_AT_A_TIME = 2**24  # elements


@dataclass(frozen=True)
class OnDevice:
    """A value of the state, not by element, that belongs on the device of its parameter.

    Attributes:
        value: in the memory of the CPU, in which state travels.
    """

    value: torch.Tensor


def gathered(
    entries: Sequence[ParameterEntry],
    pieces: Iterable[Piece],
    state: Mapping[torch.Tensor, dict[str, Any]],
    gather: Gather,
) -> Iterator[Whole]:
    """The whole state of each parameter that has any, in CPU memory. Collective.

    Args:
        entries: in the same order on all ranks.
        pieces, state: of this rank.
        gather: exchanges objects.
    """
    mine: dict[ParameterEntry, list[tuple[int, int, dict[str, Any]]]] = {}
    for piece in pieces:
        values = dict(state.get(piece.values, {}))
        if piece.has_master:
            values[MASTER] = piece.values.data
        if values:
            mine.setdefault(piece.entry, []).append((piece.begin, piece.end, values))
    for chunk in _chunks(entries):
        told = gather([
            [(begin, end, _sent(values, end - begin)) for begin, end, values in mine.get(entry, ())]
            for entry in chunk
        ])  # fmt: skip
        for entry, parts in zip(chunk, zip(*told, strict=True), strict=True):
            whole = _join(entry, [part for of_rank in parts for part in of_rank])
            if whole:
                yield entry, whole


def _chunks(entries: Sequence[ParameterEntry]) -> Iterator[list[ParameterEntry]]:
    chunk: list[ParameterEntry] = []
    elements = 0
    for entry in entries:
        if chunk and elements + entry.parameter.numel() > _AT_A_TIME:
            yield chunk
            chunk, elements = [], 0
        chunk.append(entry)
        elements += entry.parameter.numel()
    if chunk:
        yield chunk


def on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, with tensors in the memory of the CPU."""
    return {
        key: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }


def _sent(values: Mapping[str, Any], length: int) -> dict[str, Any]:
    sent = on_cpu(values)
    for key, value in values.items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.device.type != "cpu" and not is_by_element(key, value, (length,)):
            sent[key] = OnDevice(sent[key])
    return sent


def is_by_element(key: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value of the state has one number for each element of a tensor of this shape."""
    # "step" is torch's name for a count, which has the shape of a parameter without dimensions.
    return isinstance(value, torch.Tensor) and value.shape == shape and key != "step"


def _join(
    entry: ParameterEntry, parts: Sequence[tuple[int, int, dict[str, Any]]]
) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for begin, end, values in parts:
        for key, value in values.items():
            if not is_by_element(key, value, (end - begin,)):
                if key not in whole:  # this rank's own would change with the next step
                    whole[key] = copy.deepcopy(value)
                continue
            if key not in whole:
                whole[key] = value.new_zeros(entry.parameter.numel())
            whole[key][begin:end] = value
    return whole


def cut(wholes: Iterable[Whole], pieces: Iterable[Piece]) -> dict[torch.Tensor, dict[str, Any]]:
    """The state of the pieces, by `Piece.values`; fills their master copies."""
    by_entry: dict[ParameterEntry, list[Piece]] = {}
    for piece in pieces:
        by_entry.setdefault(piece.entry, []).append(piece)
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for entry, whole in wholes:
        for piece in by_entry.get(entry, ()):
            values = {}
            for key, value in whole.items():
                if isinstance(value, OnDevice):
                    values[key] = value.value.to(piece.wire.device, copy=True)
                    continue
                if not is_by_element(key, value, (entry.parameter.numel(),)):
                    values[key] = copy.deepcopy(value)
                    continue
                part = value[piece.begin : piece.end].to(piece.wire.device, copy=True)
                if piece.is_master and part.is_floating_point():
                    part = part.float()
                values[key] = part
            master = values.pop(MASTER, None)
            if piece.is_master and master is not None:
                piece.values.data.copy_(master)
                piece.has_master = True
            state[piece.values] = values
    return state


def of_parameters(
    states: Iterable[tuple[ParameterEntry, Mapping[str, Any]]],
) -> Iterator[Whole]:
    """States with tensors of the parameters' shapes, as `cut` takes them."""
    for entry, values in states:
        shape = tuple(entry.parameter.shape)
        yield (
            entry,
            {
                key: in_wire_order(value.detach(), entry.wire)
                if is_by_element(key, value, shape)
                else value
                for key, value in values.items()
            },
        )


def placed_as_loaded(
    key: str, value: Any, parameter: torch.Tensor, group: Mapping[str, Any]
) -> Any:
    """A value of a loaded state, marked if torch's optimizers put it on the device then."""
    if not isinstance(value, torch.Tensor) or is_by_element(key, value, tuple(parameter.shape)):
        return value
    is_count = key == "step" and not (group.get("capturable") or group.get("fused"))
    return value if is_count else OnDevice(value.cpu())


def for_parameter(whole: Whole) -> dict[str, Any]:
    """The state of one parameter in CPU memory, with tensors of its shape."""
    entry, values = whole
    found = {}
    for key, value in values.items():
        if isinstance(value, OnDevice):
            found[key] = value.value
        elif is_by_element(key, value, (entry.parameter.numel(),)):
            found[key] = in_own_order(value, entry.wire)
        else:
            found[key] = value
    return found
