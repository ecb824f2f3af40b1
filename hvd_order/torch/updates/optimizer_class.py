"""The class of a distributed optimizer: the user's own, with methods of ours over it.

While updates are outstanding, it is a class that finishes them before anybody looks at the
optimizer's state or attributes, or changes these: as with parameters, the class is swapped.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
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
    distributed: Any = type(base.__name__, (base,), members)
    distributed._hvd_ordinary = distributed
    distributed._hvd_guarded = type(base.__name__, (_Guarded, distributed), {})
    changed.__class__ = distributed


# What has nothing to do with outstanding updates: the groups' values were taken down at step(), and
# methods of torch's base class look at other attributes through the guard themselves.
_HARMLESS_TO_READ = frozenset([
    *(name for name, value in vars(Optimizer).items() if isinstance(value, types.FunctionType)),
    "__class__", "flush", "synchronize", "skip_synchronize", "overlap_report",
    "set_backward_passes_per_step", "param_groups", "defaults", "_zero_grad_profile_name",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_opt_called", "_step_count",
    "_parameter_names",
])  # fmt: skip
# Schedulers leave their marks.
_HARMLESS_TO_SET = frozenset(["param_groups", "_opt_called", "_step_count"])


class _Guarded:
    """Finishes outstanding updates before an attribute is looked at or changed."""

    def __getattribute__(self, name: str) -> Any:
        if name in _HARMLESS_TO_READ or name.startswith("_hvd_"):
            return object.__getattribute__(self, name)
        object.__getattribute__(self, "_hvd_exchange").flush()  # which ends the guard
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HARMLESS_TO_SET or name.startswith("_hvd_"):
            object.__setattr__(self, name, value)
        else:
            object.__getattribute__(self, "_hvd_exchange").flush()
            setattr(self, name, value)

    def __delattr__(self, name: str) -> None:
        object.__getattribute__(self, "_hvd_exchange").flush()
        delattr(self, name)


def guard(optimizer: Optimizer) -> None:
    """Updates are outstanding from now on."""
    object.__setattr__(optimizer, "__class__", cast("Any", optimizer)._hvd_guarded)


def unguard(optimizer: Optimizer) -> None:
    """No more are outstanding. Harmless without a guard."""
    object.__setattr__(optimizer, "__class__", cast("Any", optimizer)._hvd_ordinary)


def _redirect_scheduler(optimizer: Any) -> None:
    """A scheduler made before wrapping has put a wrapper of the old step() on the instance."""
    patched = vars(optimizer).get("step")
    if patched is None:
        return
    if not is_from_scheduler(patched, type(optimizer).step):
        raise InvalidUsage(
            "something has replaced optimizer.step on this object, so its gradients would not be "
            "exchanged; call DistributedOptimizer before it"
        )

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    cast("Any", step)._wrapped_by_lr_sched = True
    optimizer.step = step


def is_from_scheduler(function: Any, method: Any) -> bool:
    """Whether ``function`` is what a scheduler puts over ``method``, and over nothing else."""
    wrapped = getattr(function, "__wrapped__", None)
    return hasattr(function, "_wrapped_by_lr_sched") and any(
        layer is wrapped for layer in layers(method)
    )


def layers(function: Any) -> Iterator[Any]:
    """A function and those that it was wrapped around, by ``functools.wraps``."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def rebuild(optimizer_class: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    """An optimizer of the user's own class, from what a distributed one has pickled."""
    optimizer = optimizer_class.__new__(optimizer_class)
    cast("Any", optimizer).__setstate__(state)
    return optimizer
