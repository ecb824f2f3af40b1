"""The class of a distributed optimizer: the user's class, with some methods replaced.

While updates are deferred, a swapped class applies them before the optimizer's state or attributes
are read or changed. Parameters use the same technique.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, cast

from torch.optim import Optimizer

from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.parameters import graph_capture

__all__: list[str] = []


def give_methods(optimizer: Optimizer, methods: type) -> None:
    """Replaces methods and properties of ``optimizer``, which stays an instance of its own class.

    ``methods`` is a class with a ``step``; it finds the user's class as ``self._hvd_base``.

    Raises:
        InvalidUsage: other code has replaced ``step`` on the object.
    """
    base = type(optimizer)
    changed = cast("Any", optimizer)
    _redirect_scheduler(changed)
    changed._hvd_base = base
    changed._hvd_stepped = False
    ours: dict[str, Any] = {
        name: graph_capture.outside(value) if isinstance(value, types.FunctionType) else value
        for name, value in vars(methods).items()
        if isinstance(value, (types.FunctionType, property))
    }
    # Step hooks and the profiler's range run once for each step() of the user's.
    step: Any = graph_capture.outside(Optimizer.profile_hook_step(vars(methods)["step"]))
    step.hooked = True
    members = {**ours, "step": step, "__module__": base.__module__}
    distributed: Any = type(base.__name__, (base,), members)
    distributed._hvd_ordinary = distributed
    distributed._hvd_guarded = type(base.__name__, (_GuardedOptimizer, distributed), {})
    changed.__class__ = distributed


# Attributes independent of deferred updates: the groups' values were recorded at step(), and
# methods of torch's base class go through the guard for other attributes.
_HARMLESS_TO_READ = frozenset([
    *(name for name, value in vars(Optimizer).items() if isinstance(value, types.FunctionType)),
    "__class__", "flush", "synchronize", "skip_synchronize", "overlap_report",
    "compression_report", "set_backward_passes_per_step", "backward_passes_per_step",
    "param_groups", "defaults",
    "_zero_grad_profile_name", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_opt_called", "_step_count", "_parameter_names",
])  # fmt: skip
# Schedulers set these attributes.
_HARMLESS_TO_SET = frozenset(["param_groups", "_opt_called", "_step_count"])


class _GuardedOptimizer:
    """Applies deferred updates before an attribute is read or changed."""

    def __getattribute__(self, name: str) -> Any:
        if name in _HARMLESS_TO_READ or name.startswith("_hvd_"):
            return object.__getattribute__(self, name)
        object.__getattribute__(self, "_hvd_exchange").flush()  # also removes the guard
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
    """Starts the guard when updates are deferred."""
    object.__setattr__(optimizer, "__class__", cast("Any", optimizer)._hvd_guarded)


def unguard(optimizer: Optimizer) -> None:
    """Ends the guard when no updates are deferred. Has no effect without a guard."""
    object.__setattr__(optimizer, "__class__", cast("Any", optimizer)._hvd_ordinary)


def _redirect_scheduler(optimizer: Any) -> None:
    """Redirects a scheduler's wrapper, set before the optimizer became distributed, to the new
    step().
    """
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
    """Whether ``function`` is a scheduler's wrapper of ``method`` and of nothing else."""
    wrapped = getattr(function, "__wrapped__", None)
    return hasattr(function, "_wrapped_by_lr_sched") and any(
        layer is wrapped for layer in layers(method)
    )


def layers(function: Any) -> Iterator[Any]:
    """A function and the functions that it wraps by ``functools.wraps``."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def rebuild(optimizer_class: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    """An optimizer of the user's own class, from the pickle of a distributed one."""
    optimizer = optimizer_class.__new__(optimizer_class)
    cast("Any", optimizer).__setstate__(state)
    return optimizer
