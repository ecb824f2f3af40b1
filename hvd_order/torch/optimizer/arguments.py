"""The arguments of ``DistributedOptimizer``, with Horovod's checks and errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import cast

import torch
from torch.optim import Optimizer

from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.requests.reduce_ops import Adasum, Average, ReduceOp, Sum
from hvd_order.torch.gradients.misuse import check_passes
from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []


def check(optimizer: Optimizer, passes: int, op: ReduceOp, predivide_factor: float) -> None:
    """Raises TypeError, ValueError or InvalidUsage for arguments out of range."""
    if hasattr(optimizer, "_hvd_exchange"):
        raise InvalidUsage("this optimizer is distributed already; wrap it once")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}; wrap the "
            "optimizer, not the model"
        )
    check_passes(passes)
    if op not in (Average, Sum, Adasum):
        raise InvalidUsage(f"op must be hvd.Average, hvd.Sum or hvd.Adasum, got {op}")
    if predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if predivide_factor <= 0:
        raise ValueError(f"gradient_predivide_factor must be positive, got {predivide_factor}")


def check_groups(num_groups: int, groups: object) -> None:
    """Raises the same errors as Horovod."""
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=3,
        )
        groups = num_groups if groups is None else groups
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups <= 0:
            raise ValueError(
                "groups should be a non-negative integer or a list of list of torch.Tensor."
            )
        return
    seen: set[int] = set()
    for parameter in (parameter for group in groups for parameter in group):
        if not isinstance(parameter, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(parameter) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(parameter))


def named_entries(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[ParameterEntry]:
    """The parameters of the optimizer with their names, in the order of ``named_parameters``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        named = [
            (f"allreduce.noname.{g}.{i}", p)
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
        ]
    else:
        named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    names = [name for name, _ in named]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(duplicates)
        )
    known = {id(p) for _, p in named}
    unnamed = [p for p in parameters if id(p) not in known]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            + ", ".join(f"shape {list(p.shape)}" for p in unnamed[:5])
            + ". Name every parameter of the optimizer, or none."
        )
    mine = {id(p) for p in parameters}
    return [
        ParameterEntry(cast("torch.nn.Parameter", p), name) for name, p in named if id(p) in mine
    ]
