"""Whether the updates of an optimizer may be deferred, parameter by parameter.

They may if each parameter is updated from its own gradient and state and the settings of its group
alone. Either the class has been read (known_optimizers.py), or the user declares it; otherwise
``step()`` updates at once. A trial (separability_trial.py) is the second check. Objects that an
optimizer holds (optimizer_reach.py) can forbid deferral in every case.

Nothing here runs or changes the user's optimizer, its parameters, gradients or state.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass

from torch.optim import Optimizer

from hvd_order.torch.updates import known_optimizers, optimizer_reach, separability_trial
from hvd_order.torch.updates.partial_step import inner_step

__all__: list[str] = []

_log = logging.getLogger("hvd_order")
_said: set[str] = set()

_DECLARATION = "hvd_order_separable"  # a class attribute
_CURE = (
    "if it does, pass separable=True to DistributedOptimizer, or set hvd_order_separable = True in "
    "the class"
)


@dataclass(frozen=True)
class Separability:
    """Whether updates may be deferred.

    Attributes:
        separable: they may be deferred.
        evaluates_closure_once: they may also with ``step(closure)``, which calls the closure once,
            first of all.
        reason: one line; if updates may not be deferred, why, and the cure if there is one.
        expected: the user requested this, or is aware of it.
    """

    separable: bool
    evaluates_closure_once: bool
    reason: str
    expected: bool = True


def separability(
    optimizer: Optimizer, base: type[Optimizer], declared: bool | None = None
) -> Separability:
    """Decides for one optimizer in its current state.

    Args:
        base: the class whose ``step`` runs: the user's own, before it is made distributed.
        declared: the user's statement; None: use the class attribute ``hvd_order_separable``, if
            any.
    """
    name = f"{base.__module__}.{base.__qualname__}"
    if declared is None:
        declared = _declared_by_class(base)
    if declared is False:
        return Separability(False, False, f"{name} was declared as not separable")
    read = known_optimizers.reading(optimizer, base)
    replaced = None if read is None else known_optimizers.replaced_method(optimizer, base)
    if read is None or replaced is not None:
        read = None
        if not declared:
            what = f"{name} is not known to" if replaced is None else (
                f"{replaced} has been replaced, so {name} is not known any more to"
            )  # fmt: skip
            reason = f"{what} update each parameter by itself; {_CURE}"
            return Separability(False, False, reason, False)
    elif read.objection is not None:
        return Separability(False, False, f"{name}: {read.objection}", not declared)
    known = read is not None
    found = optimizer_reach.objection(optimizer, base, known) or optimizer_reach.sharing(optimizer)
    if found is not None:
        return Separability(False, False, f"{name}: {found}", False)
    found = separability_trial.difference(optimizer, base, inner_step(base), known)
    if found is not None:
        return Separability(False, False, f"{name}: in a trial, {found}", False)
    if read is None:
        return Separability(True, False, f"{name} was declared as separable")
    return Separability(
        True, read.evaluates_closure_once, f"{name} is known to update each parameter by itself"
    )


def _declared_by_class(base: type[Optimizer]) -> bool | None:
    """The class's declaration, unless a class below the declaring one has its own ``step``."""
    for kind in base.__mro__:
        if _DECLARATION in vars(kind):
            same_step = inspect.unwrap(kind.step) is inspect.unwrap(base.step)  # type: ignore[attr-defined]
            return bool(vars(kind)[_DECLARATION]) if same_step else None
    return None


def log_reason(verdict: Separability) -> None:
    """Logs why updates are not deferred, once for each reason."""
    if verdict.separable or verdict.reason in _said:
        return
    _said.add(verdict.reason)
    _log.log(
        logging.INFO if verdict.expected else logging.WARNING,
        "all parameters are updated at once, in step(): %s", verdict.reason,
    )  # fmt: skip
