"""Objects that an optimizer can reach beside its parameters, above all other optimizers."""

from __future__ import annotations

import gc
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

__all__: list[str] = []

_MOST_OBJECTS = 100_000  # beyond this, an attribute holds a whole program

_ATOMS: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, torch.dtype,
    torch.device, torch.Size, types.BuiltinFunctionType,
)  # fmt: skip


def sharing(optimizer: Optimizer) -> str | None:
    """The name of another optimizer with the same ``param_groups`` or ``state`` object, if any."""
    own = vars(optimizer)
    # Two references are the optimizer's own and the one of the call. A search through all objects
    # of the program would take a tenth of a second.
    held = [name for name in ("param_groups", "state") if sys.getrefcount(own[name]) > 2]
    if held:
        for other in gc.get_objects():
            if issubclass(type(other), Optimizer) and other is not optimizer:
                for name in held:
                    if vars(other).get(name) is own[name]:
                        return f"it shares {name} with an optimizer of class {type(other).__name__}"
    return None


def objection(optimizer: Optimizer, base: type[Optimizer], known: bool) -> str | None:
    """What the optimizer holds that makes an update in parts, or its trial, unsafe; or None.

    For every class: another optimizer. For a class that has not been read also: its own parameters
    outside of ``param_groups``, which it would update whatever the groups list; random generators;
    and objects that only a function holds, which a trial on a copy would change.

    Args:
        base: the class whose ``step`` runs.
        known: the class has been read.
    """
    if not {"param_groups", "state"} <= vars(optimizer).keys():
        return "its groups or its state are taken from something else"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    storages = set() if known else {p.untyped_storage()._cdata for p in parameters}
    seen: dict[int, object] = {}  # holds the objects, so that no id is reused
    queue = deque(_roots(optimizer, base, known))
    while queue:
        path, value, of_function = queue.popleft()
        kind = type(value)
        if issubclass(kind, _ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value
        if len(seen) > _MOST_OBJECTS:
            return f"its attributes reach more than {_MOST_OBJECTS} objects"
        if issubclass(kind, Optimizer) and value is not optimizer:
            return f"it holds another optimizer, of class {kind.__name__} ({path})"
        if not known and (found := _of_unread(path, value, of_function, storages)):
            return found
        if value is not optimizer and not issubclass(kind, torch.Tensor):
            queue.extend(_children(path, value))
    return None


def _roots(
    optimizer: Optimizer, base: type[Optimizer], known: bool
) -> Iterator[tuple[str, object, bool]]:
    for name, value in vars(optimizer).items():
        # Hooks run once for each step() of the user's, outside of the deferred update.
        if name not in ("state", "param_groups", "step") and not name.endswith("_hooks"):
            yield f"attribute '{name}'", value, False
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                yield f"group entry '{name}'", value, False
    if not known:
        for kind in base.__mro__[: base.__mro__.index(Optimizer)]:
            for name, member in vars(kind).items():
                if isinstance(member, types.FunctionType):
                    yield f"{kind.__name__}.{name}", member, False


def _of_unread(path: str, value: object, of_function: bool, storages: set[int]) -> str | None:
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        tensor: Any = value
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages:
            return f"it keeps its parameters outside of its groups ({path})"
    if issubclass(kind, (torch.Generator, random.Random)) or kind.__module__.startswith(
        "numpy.random"
    ):
        return f"it has a random generator ({path})"
    if of_function and not issubclass(kind, (types.FunctionType, types.CodeType)):
        return f"a function of it keeps a {kind.__name__} ({path})"
    return None


def _children(path: str, value: Any) -> Iterator[tuple[str, object, bool]]:
    kind = type(value)
    if kind is types.FunctionType:
        yield from _of_function(path, value)
    elif issubclass(kind, weakref.ref):
        yield path, value(), False
    elif kind is dict:
        for key, item in value.items():
            yield path, key, False
            yield f"{path}[{key!r}]" if isinstance(key, (str, int)) else path, item, False
    else:
        # Covers lists, bound methods, partial functions, slots, and classes written in C.
        attributes = getattr(value, "__dict__", None) or {}
        names = {id(item): name for name, item in attributes.items()}
        for item in gc.get_referents(value):
            if item is attributes:
                for name, each in attributes.items():
                    yield f"{path}.{name}", each, False
            else:
                name = names.get(id(item))
                yield path if name is None else f"{path}.{name}", item, False


def _of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, object, bool]]:
    foreign = function.__globals__.get("__name__", "").partition(".")[0] != "torch"
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield f"{path}, its '{name}'", cell.cell_contents, foreign
        except ValueError:  # not assigned yet
            continue
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield path, value, foreign
    if not foreign:
        return
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        kind = type(value)
        if kind in (list, tuple, dict, set, types.FunctionType) or issubclass(kind, Optimizer):
            yield f"{path}, global '{name}'", value, False


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
