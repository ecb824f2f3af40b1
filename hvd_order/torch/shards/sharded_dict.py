"""The optimizer's state as torch.distributed.checkpoint saves it: by name, each rank its shards.

The dictionary has the keys of ``get_optimizer_state_dict`` on every rank, also on a rank without a
piece of the parameter. So it fits checkpoints of any number of ranks and of ordinary optimizers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.shards.piece import Piece
from hvd_order.torch.shards.shard_state import MASTER, Gather, is_by_element, on_cpu
from hvd_order.torch.shards.state_shards import StateShards
from hvd_order.torch.updates.first_state import first_state
from hvd_order.torch.updates.partial_step import InnerStep

__all__: list[str] = []

_NUMBERED = "allreduce.noname."
# Modules that wrap others have these in the names of parameters; checkpoints do not.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def key_of(name: str) -> str:
    """A parameter's name in checkpoints, from its name in the model.

    Raises:
        InvalidUsage: the program has not named it.
    """
    if name.startswith(_NUMBERED):
        raise InvalidUsage(
            f"sharded_state_dict() stores state by the names of parameters, but '{name}' has none: "
            "pass named_parameters=model.named_parameters() to DistributedOptimizer; for "
            "add_param_group(), make the optimizer with named parameters"
        )
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def groups_by_name(
    groups: Iterable[dict[str, Any]], optimizer: Optimizer, names: Mapping[torch.nn.Parameter, str]
) -> list[dict[str, Any]]:
    """The groups of the optimizer's ``state_dict``, with names in place of numbers."""
    return [
        {**group, "params": [key_of(names[p]) for p in own["params"]]}
        for group, own in zip(groups, optimizer.param_groups, strict=True)
    ]


def check_groups(
    groups: Sequence[dict[str, Any]], optimizer: Optimizer, names: Mapping[torch.nn.Parameter, str]
) -> None:
    """Compares the loaded groups with the optimizer's.

    Raises:
        InvalidUsage: they have other parameters.
    """
    own = [[key_of(names[p]) for p in group["params"]] for group in optimizer.param_groups]
    loaded = [list(group["params"]) for group in groups]
    if len(own) != len(loaded):
        raise InvalidUsage(
            f"the checkpoint has {len(loaded)} parameter groups, the optimizer has {len(own)}"
        )
    for number, (here, there) in enumerate(zip(own, loaded, strict=True)):
        for mine, its in itertools.zip_longest(here, there):
            if mine != its:
                raise InvalidUsage(
                    f"parameter group {number} has other parameters in the checkpoint than in the "
                    f"optimizer: {_told(its)} there, where the optimizer has {_told(mine)}"
                )


def _told(name: str | None) -> str:
    return "none" if name is None else f"'{name}'"


def shards_by_name(
    entries: Sequence[ParameterEntry], state: Mapping[Piece, Mapping[str, Any]], gather: Gather
) -> dict[str, dict[str, Any]]:
    """The state of each parameter that has any. Collective: keys and values that are not by element
    are exchanged, elements are not.

    Args:
        entries: in the same order on all ranks.
        state: of this rank's pieces, with master copies.
        gather: exchanges objects.
    """
    told = {
        key_of(piece.entry.name): _kinds(piece, values)
        for piece, values in state.items()
        if piece.begin == 0 and values
    }
    kinds = {name: found for of_rank in gather(told) for name, found in of_rank.items()}
    pieces: dict[ParameterEntry, list[Piece]] = {}
    for piece in state:
        pieces.setdefault(piece.entry, []).append(piece)
    return {
        name: _values(
            entry, kinds[name], [(piece, state[piece]) for piece in pieces.get(entry, ())]
        )
        for entry in entries
        if (name := key_of(entry.name)) in kinds
    }


def _kinds(piece: Piece, values: Mapping[str, Any]) -> dict[str, Any]:
    """The dtype of what is by element, and what is not."""
    shape = (piece.end - piece.begin,)
    others = on_cpu({k: v for k, v in values.items() if not is_by_element(k, v, shape)})
    return {key: (others[key],) if key in others else value.dtype for key, value in values.items()}


def _values(
    entry: ParameterEntry,
    kinds: Mapping[str, Any],
    pieces: Sequence[tuple[Piece, Mapping[str, Any]]],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, kind in kinds.items():
        if isinstance(kind, torch.dtype):
            parts = [(piece.begin, values[key]) for piece, values in pieces]
            wire = entry.wire
            found[key] = StateShards(wire.shape, wire.stride(), parts, kind, wire.device)
        elif pieces:
            found[key] = copy.deepcopy(pieces[0][1][key])
        else:
            (found[key],) = kind
    return found


def on_one_rank(
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    step: InnerStep,
    names: Mapping[torch.nn.Parameter, str],
) -> dict[str, Any]:
    """The same on a single rank, which has the whole state.

    Args:
        state_dict: with numbers for parameters.
        step: of the optimizer's class.
        names: of its parameters.
    """
    groups = groups_by_name(state_dict["param_groups"], optimizer, names)
    numbers = [p for group in state_dict["param_groups"] for p in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        key_of(names[p]): dict(state_dict["state"].get(number, {}))
        for number, p in zip(numbers, parameters, strict=True)
    }
    if not state_dict["state"]:
        make = first_state(optimizer, step)
        state = {key_of(names[p]): make(p, p) for p in parameters if p.requires_grad}
    return {
        "state": {name: found for name, found in state.items() if found},
        "param_groups": groups,
    }


def is_by_name(state_dict: Mapping[str, Any]) -> bool:
    """Whether names stand for parameters, and not numbers."""
    return any(isinstance(p, str) for group in state_dict["param_groups"] for p in group["params"])


def has_shards(state: Mapping[Any, Any]) -> bool:
    """Whether a loaded ``state`` consists of shards, and not of the whole state."""
    return any(
        isinstance(value, StateShards)
        for values in state.values()
        if isinstance(values, Mapping)
        for value in values.values()
    )


def of_pieces(
    entries: Sequence[ParameterEntry],
    pieces: Sequence[Piece],
    state: Mapping[str, Mapping[str, Any]],
) -> dict[Piece, dict[str, Any]]:
    """The inverse of `shards_by_name`: the state of this rank's pieces, with master copies.

    Values by element are those of ``state`` itself, others are copies.

    Raises:
        InvalidUsage: other parameters, or shards that were cut elsewhere.
    """
    unknown = sorted(state.keys() - {key_of(entry.name) for entry in entries})
    if unknown:
        raise InvalidUsage(f"the optimizer has no parameter '{unknown[0]}', but the state has one")
    found: dict[Piece, dict[str, Any]] = {}
    for piece in pieces:
        name = key_of(piece.entry.name)
        values = {}
        for key, value in state.get(name, {}).items():
            values[key] = _of_piece(piece, f"'{key}' of parameter '{name}'", key, value)
        if values:
            found[piece] = values
    return found


def _of_piece(piece: Piece, what: str, key: str, value: Any) -> Any:
    if isinstance(value, StateShards):
        part = value.part(piece.begin, piece.end)
        if part is None:
            raise InvalidUsage(
                f"this rank's shards have moved since sharded_state_dict(), so {what} does not fit "
                "any more: call it, dcp.load and load_state_dict() with no step() between them"
            )
        return part
    shape = tuple(piece.entry.parameter.shape)
    if key == MASTER or (shape and is_by_element(key, value, shape)):
        raise InvalidUsage(f"{what} is a whole tensor among shards: pass shards only, or none")
    return copy.deepcopy(value)
