"""Optimizers whose source has been read, and whether they are separable.

A class is recognized by identity, never by name or ancestry alone, because a subclass may do
anything. Classes of other packages are listed with the versions that were read. torch's own are
those of 2.13; for other versions, the trial (separability_trial.py) is the second check. Nothing
is listed unread.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.torch.updates.optimizer_class import is_from_scheduler, layers

__all__: list[str] = []

# Why the options of an optimizer do not allow deferral, or None.
Condition = Callable[[Optimizer], "str | None"]


@dataclass(frozen=True)
class SourceReading:
    """Result of reading an optimizer's source.

    Attributes:
        objection: why its parameters cannot be updated in parts; None: they can.
        evaluates_closure_once: ``step(closure)`` calls the closure once, with gradients enabled,
            before it does anything else.
    """

    objection: str | None
    evaluates_closure_once: bool


def reading(optimizer: Optimizer, base: type[Optimizer]) -> SourceReading | None:
    """The reading of ``optimizer``; None if its class has not been read.

    Args:
        base: the class whose ``step`` runs.
    """
    package = base.__module__.partition(".")[0]
    if package == "torch":
        return _read_in_torch(optimizer, base)
    if not _is_at_home(base):
        return None
    read = _OF_PACKAGES.get((base.__module__, base.__qualname__))
    if read is None or not _was_read(*_VERSIONS[package]):
        return None
    return SourceReading(
        _differentiable(optimizer) or read.condition(optimizer), read.evaluates_closure_once
    )


def replaced_method(optimizer: Optimizer, base: type[Optimizer]) -> str | None:
    """The first method of a known class that differs from the one that was read, or None."""
    for kind in base.__mro__[: base.__mro__.index(Optimizer)]:
        for name, member in vars(kind).items():
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if name.startswith("__") or not isinstance(member, types.FunctionType):
                continue
            if not _is_of(member, kind):
                return f"{base.__name__}.{name}"
    for name, value in vars(optimizer).items():
        method = getattr(base, name, None)
        # The scheduler's wrapper is replaced when the optimizer becomes distributed.
        if inspect.isfunction(method) and not is_from_scheduler(value, method):
            return f"{name} on the object"
    return None


def changes_state_in_place(optimizer: Optimizer, base: type[Optimizer]) -> bool:
    """Whether an update changes only elements of the tensors in a parameter's state, once the state
    has them. Known of torch's classes alone; others replace tensors, or count in numbers.
    """
    return base in _torch_classes() and replaced_method(optimizer, base) is None


def _is_of(function: types.FunctionType, kind: type) -> bool:
    """Whether the function is the class's own, under decorators of torch or of its own package.

    An inherited function counts too: torch decorates ``step`` in the class of the first object,
    which for AdamW need not be the class that defines it.
    """
    packages = {"torch", kind.__module__.partition(".")[0]}
    homes: list[str] = [layer.__globals__.get("__name__", "") for layer in layers(function)]
    if not all(home.partition(".")[0] in packages for home in homes):
        return False
    # torch.optim.Muon gives its module as torch.optim, but is defined in a submodule.
    ancestors = kind.__mro__[: kind.__mro__.index(Optimizer)]
    return any(f"{homes[-1]}.".startswith(f"{k.__module__}.") for k in ancestors)


def _is_at_home(base: type) -> bool:
    return getattr(sys.modules.get(base.__module__), base.__qualname__, None) is base


# ---- torch ------------------------------------------------------------------------------------


def _read_in_torch(optimizer: Optimizer, base: type[Optimizer]) -> SourceReading | None:
    if base not in _torch_classes():
        return None
    if base is torch.optim.LBFGS:
        return SourceReading("LBFGS looks across all parameters", evaluates_closure_once=False)
    objection = _differentiable(optimizer)
    if base is getattr(torch.optim, "Adafactor", None):
        objection = objection or _one_dtype_where_eps_is_none(optimizer)
    return SourceReading(objection, evaluates_closure_once=True)


def _torch_classes() -> Iterator[type[Optimizer]]:
    """Classes of torch.

    In all of them ``foreach``, ``fused``, ``capturable``, tensor rates and betas, ``maximize`` and
    the like only select how one parameter is updated by its own gradient and state.
    """
    for name in (
        "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop",
        "Rprop", "ASGD", "SparseAdam", "Adafactor", "Muon", "LBFGS",
    ):  # fmt: skip
        if hasattr(torch.optim, name):  # Muon came with 2.9
            yield getattr(torch.optim, name)


def _differentiable(optimizer: Optimizer) -> str | None:
    if any(group.get("differentiable") for group in (optimizer.defaults, *optimizer.param_groups)):
        return "differentiable=True makes the update a part of the graph"
    return None


def _one_dtype_where_eps_is_none(optimizer: Optimizer) -> str | None:
    """Adafactor takes the default of eps[0] from the first parameter, and uses it for the rest."""
    for group in optimizer.param_groups:
        if group["eps"][0] is None and len({p.dtype for p in group["params"]}) > 1:
            return (
                "Adafactor uses the eps of the first parameter's dtype for all of a group, and one "
                "has several dtypes; give a number for eps[0], or make a group for each dtype"
            )
    return None


# ---- other packages ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    condition: Condition
    evaluates_closure_once: bool = True


def _always(_: Optimizer) -> str | None:
    return None


def _never(why: str) -> _Read:
    return _Read(lambda _: why, evaluates_closure_once=False)


def _not_relative_step(optimizer: Optimizer) -> str | None:
    if any(group["relative_step"] for group in optimizer.param_groups):
        return "Adafactor without lr writes the one that it chooses into its groups"
    return None


def _not_by_triton(optimizer: Any) -> str | None:
    if optimizer.update_fn.__module__ != "lion_pytorch.lion_pytorch":
        return "lion_pytorch's Triton kernel has not been looked at; use_triton=False is known"
    return None


# The distribution, and its first and last version that were read.
_VERSIONS: dict[str, tuple[str, str, str]] = {
    "timm": ("timm", "1.0.31", "1.0.31"),
    "lion_pytorch": ("lion-pytorch", "0.2.4", "0.2.5"),
    "transformers": ("transformers", "4.57.1", "5.23.0"),
}

_OF_PACKAGES: dict[tuple[str, str], _Read] = {
    **{
        (f"timm.optim.{module}", name): _Read(_always)
        for module, name in (
            ("adabelief", "AdaBelief"), ("adafactor_bv", "AdafactorBigVision"),
            ("adamp", "AdamP"), ("adamw", "AdamWLegacy"), ("adopt", "Adopt"),
            ("laprop", "LaProp"), ("lars", "Lars"), ("lion", "Lion"), ("madgrad", "MADGRAD"),
            ("mars", "Mars"), ("nadam", "NAdamLegacy"), ("nadamw", "NAdamW"),
            ("nvnovograd", "NvNovoGrad"), ("radam", "RAdamLegacy"), ("rmsprop_tf", "RMSpropTF"),
            ("sgdp", "SGDP"), ("sgdw", "SGDW"),
        )
    },
    ("timm.optim.adafactor", "Adafactor"): _Read(_not_relative_step),
    ("timm.optim.lamb", "Lamb"): _never("Lamb counts its steps in its groups"),
    ("timm.optim.adan", "Adan"): _never("Adan counts its steps in its groups"),
    ("timm.optim.lookahead", "Lookahead"): _never("Lookahead runs another optimizer"),
    ("lion_pytorch.lion_pytorch", "Lion"): _Read(_not_by_triton),
    ("lion_pytorch.foreach", "Lion"): _Read(_always),
    # Calls the closure without enabling gradients.
    ("transformers.optimization", "Adafactor"): _Read(_always, evaluates_closure_once=False),
}  # fmt: skip


def _was_read(distribution: str, first: str, last: str) -> bool:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return _numbers(first) <= _numbers(version) <= _numbers(last) and not _is_unreleased(version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _is_unreleased(version: str) -> bool:
    return re.search(r"dev|rc|[ab]\d", version) is not None
