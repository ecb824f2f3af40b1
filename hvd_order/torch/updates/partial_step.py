"""Runs the user's own optimizer on some of its parameters, with the settings of a past step.

Works with any ``torch.optim.Optimizer``: the inner step runs on a stand-in whose parameter groups
list only the parameters to update, so that foreach and fused kernels still process many tensors at
once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.torch.updates.clean_room import Conditions

__all__: list[str] = []

InnerStep = Callable[..., Any]
HyperParameters = list[dict[str, Any]]


def inner_step(optimizer_class: type[Optimizer]) -> InnerStep:
    """``optimizer_class.step`` without the wrapper that runs step hooks.

    Step hooks are the user's and run once a step, however many parts the update has.
    """
    step: Any = optimizer_class.step
    # torch.compile wraps the step of some classes again, and its wrapper has the same mark.
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def snapshot(optimizer: Optimizer) -> HyperParameters:
    """The current hyper-parameters of every group; a scheduler may change them any time."""
    return [
        {key: _as_now(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _as_now(value: Any) -> Any:
    """A copy that later changes of the value (such as a rate on a device) do not affect."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in (list, tuple):  # betas may be tensors as well
        return type(value)(map(_as_now, value))
    return copy.copy(value)


class RecordedStep:
    """One deferred ``step()``, which can be run later, on some parameters at a time.

    Attributes:
        optimizer: the optimizer of the step.
    """

    def __init__(self, optimizer: Optimizer, step: InnerStep) -> None:
        """Records groups, hyper-parameters and conditions.

        Args:
            step: from :func:`inner_step`.
        """
        self.optimizer = optimizer
        self._step = step
        self._hyper_parameters = snapshot(optimizer)
        groups = optimizer.param_groups
        self._group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        self._conditions = Conditions()

    def run(self, due: Iterable[torch.Tensor]) -> None:
        """Updates the parameters in ``due``, whose ``.grad`` is set, and no others."""
        # This runs once for every few parameters: its cost must not depend on their total number.
        members: list[list[torch.Tensor]] = [[] for _ in self._hyper_parameters]
        for parameter in due:
            group = self._group_of.get(id(parameter))
            if group is not None:
                members[group].append(parameter)
        with self._conditions.restored():
            self._step(with_groups(self.optimizer, [
                {"params": parameters, **values}
                for parameters, values in zip(members, self._hyper_parameters, strict=True)
                if parameters
            ]))  # fmt: skip


def with_groups(optimizer: Optimizer, groups: list[dict[str, Any]], **attributes: Any) -> Optimizer:
    """The user's optimizer with other groups; an object for one inner step.

    The optimizer itself stays unchanged: another thread may be in its ``zero_grad()``, or a
    scheduler may set its learning rate. A deferred update changes no attribute (separability.py).

    Args:
        attributes: that differ, such as ``state``.
    """
    base = getattr(optimizer, "_hvd_base", type(optimizer))
    other: Any = object.__new__(base)
    other.__dict__.update(object.__getattribute__(optimizer, "__dict__"), **attributes)
    other.param_groups = groups
    return other  # type: ignore[no-any-return]
