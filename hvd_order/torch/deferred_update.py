"""Runs the user's own optimizer on some of its parameters, as it was set at a past step.

Any ``torch.optim.Optimizer`` serves: for the time of one inner step its parameter groups list
only the parameters that are due, so that its foreach and fused kernels still take many tensors at
once.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.optim import Optimizer

__all__: list[str] = []

InnerStep = Callable[..., Any]
HyperParameters = list[dict[str, Any]]


def inner_step(optimizer_class: type[Optimizer]) -> InnerStep:
    """``optimizer_class.step`` without the wrapper that runs step hooks.

    Step hooks are the user's and fire once a step, however many parts the update has.
    """
    step: Any = optimizer_class.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def snapshot(optimizer: Optimizer) -> HyperParameters:
    """The hyper-parameters of every group as they are now; a scheduler may change them any time."""
    return [
        {
            # Only a tensor (a learning rate on the device) or a list can be changed in place.
            key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def run(
    optimizer: Optimizer,
    step: InnerStep,
    hyper_parameters: HyperParameters,
    due: Collection[torch.Tensor],
) -> None:
    """Updates the parameters in ``due``, whose ``.grad`` is set, and no others.

    Args:
        hyper_parameters: from :func:`snapshot`, one entry for each parameter group.
    """
    wanted = {id(parameter) for parameter in due}
    groups = optimizer.param_groups
    partial = []
    for group, values in zip(groups, hyper_parameters, strict=True):
        parameters = [p for p in group["params"] if id(p) in wanted]
        if parameters:
            partial.append({"params": parameters, **values})
    optimizer.param_groups = partial
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = groups


def is_separable(optimizer: Optimizer, step: InnerStep) -> bool:
    """Whether updating parameters in parts gives the same as updating them at once.

    It is tried out: two small parameters, three steps, together and one by one, with a copy of this
    optimizer's class and hyper-parameters. Optimizers that look across parameters (LBFGS) or keep
    counters in their groups differ or fail; they are updated at once, in ``step()``.
    """
    if not any(group["params"] for group in optimizer.param_groups):
        return False
    try:
        together = _trial(optimizer, step, parts=[[0, 1]])
        in_parts = _trial(optimizer, step, parts=[[1], [0]])
    except Exception:  # whatever a foreign optimizer raises on a toy problem: do not defer it
        return False
    return all(torch.equal(a, b) for a, b in zip(together, in_parts, strict=True))


def _trial(optimizer: Optimizer, step: InnerStep, parts: list[list[int]]) -> list[torch.Tensor]:
    like = next(p for group in optimizer.param_groups for p in group["params"])
    generator = torch.Generator().manual_seed(0)

    def values() -> torch.Tensor:
        numbers = torch.randn(4, 4, generator=generator)
        return numbers.to(device=like.device, dtype=like.dtype)

    toys = [torch.nn.Parameter(values()) for _ in range(2)]
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    hyper_parameters = snapshot(optimizer)[0]
    hyper_parameters.pop("param_names", None)
    for _ in range(3):
        gradients = [values() for _ in toys]
        for part in parts:
            for i in part:
                toys[i].grad = gradients[i]
            group = {"params": [toys[i] for i in part], **hyper_parameters}
            trial.param_groups = [group]
            step(trial)
            del group["params"]
            if repr(group) != repr(hyper_parameters):
                raise ValueError("the optimizer keeps state in its groups")
    return [toy.detach() for toy in toys]
