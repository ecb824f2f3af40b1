"""The class of a distributed optimizer: the user's own, with methods of ours over it."""

from __future__ import annotations

import types
from typing import Any, cast

from torch.optim import Optimizer

from hvd_order.errors import InvalidUsage

__all__: list[str] = []


def give_methods(optimizer: Optimizer, methods: type) -> None:
    """Puts the methods of a class over those of ``optimizer``, which stays an instance of its own.

    ``methods`` has a ``step``, and finds the user's class as ``self._hvd_base``.

    Raises:
        InvalidUsage: something else has replaced ``step`` on the object.
    """
    base = type(optimizer)
    changed = cast("Any", optimizer)
    _redirect_scheduler(changed)
    changed._hvd_base = base
    ours = {
        name: value
        for name, value in vars(methods).items()
        if isinstance(value, types.FunctionType)
    }
    # Step hooks and the profiler's range: once for each step() of the user's.
    step: Any = Optimizer.profile_hook_step(ours["step"])
    step.hooked = True
    members = {**ours, "step": step, "__module__": base.__module__}
    changed.__class__ = type(base.__name__, (base,), members)


def _redirect_scheduler(optimizer: Any) -> None:
    """A scheduler made before wrapping has put a wrapper of the old step() on the instance."""
    patched = vars(optimizer).get("step")
    if patched is None:
        return
    if not hasattr(patched, "_wrapped_by_lr_sched"):
        raise InvalidUsage(
            "something has replaced optimizer.step on this object, so its gradients would not be "
            "exchanged; call DistributedOptimizer before it"
        )

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    cast("Any", step)._wrapped_by_lr_sched = True
    optimizer.step = step


def rebuild(optimizer_class: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    """An optimizer of the user's own class, from what a distributed one has pickled."""
    optimizer = optimizer_class.__new__(optimizer_class)
    cast("Any", optimizer).__setstate__(state)
    return optimizer
