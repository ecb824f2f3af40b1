"""Runs the user's own optimizer on some of its parameters, as it was set at a past step.

Any ``torch.optim.Optimizer`` serves: the inner step runs on a stand-in whose parameter groups list
only the parameters that are due, so that its foreach and fused kernels still take many tensors at
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

    Step hooks are the user's and fire once a step, however many parts the update has.
    """
    step: Any = optimizer_class.step
    # torch.compile wraps the step of some classes again, and its wrapper bears the same mark.
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def snapshot(optimizer: Optimizer) -> HyperParameters:
    """The hyper-parameters of every group as they are now; a scheduler may change them any time."""
    return [
        {key: _as_now(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _as_now(value: Any) -> Any:
    """A copy that does not change when the value, a rate on a device for example, is changed."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in (list, tuple):  # betas may be tensors as well
        return type(value)(map(_as_now, value))
    return copy.copy(value)


class RecordedStep:
    """One ``step()``, put off: what it would do now can be done later, to some at a time.

    Attributes:
        optimizer: whose step it is.
    """

    def __init__(self, optimizer: Optimizer, step: InnerStep) -> None:
        """Takes down groups, hyper-parameters and conditions.

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
        # It runs once for every few parameters: what it costs must not depend on how many there
        # are.
        members: list[list[torch.Tensor]] = [[] for _ in self._hyper_parameters]
        for parameter in due:
            group = self._group_of.get(id(parameter))
            if group is not None:
                members[group].append(parameter)
        with self._conditions.restored():
            self._step(self._with_groups([
                {"params": parameters, **values}
                for parameters, values in zip(members, self._hyper_parameters, strict=True)
                if parameters
            ]))  # fmt: skip

    def _with_groups(self, groups: list[dict[str, Any]]) -> Optimizer:
        """The user's optimizer, with its state and other groups; an object for one inner step.

        The optimizer itself stays as it is: another thread may be in its ``zero_grad()``, or a
        scheduler may set its learning rate. What is put off changes no attribute (separability.py).
        """
        base = getattr(self.optimizer, "_hvd_base", type(self.optimizer))
        stand_in: Any = object.__new__(base)
        stand_in.__dict__.update(object.__getattribute__(self.optimizer, "__dict__"))
        stand_in.param_groups = groups
        return stand_in  # type: ignore[no-any-return]
