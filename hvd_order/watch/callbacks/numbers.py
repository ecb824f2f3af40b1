"""What loggers of metrics get of an optimizer's account."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["numbers_of"]


def numbers_of(optimizers: Sequence[Any]) -> dict[str, float]:
    """Returns the numbers of the distributed ones among some optimizers.

    Args:
        optimizers: each may be wrapped, as Accelerate does, in an object with an ``optimizer``.

    Returns:
        The numbers of `hvd_order.torch.DistributedOptimizer`'s ``stats().as_dict()``, by names such
        as ``hvd_order/step_s``; of the second optimizer ``hvd_order/1/step_s``. Empty before an
        account is there.
    """
    numbers: dict[str, float] = {}
    for place, optimizer in enumerate(optimizers):
        while not hasattr(optimizer, "stats") and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        stats = optimizer.stats() if hasattr(optimizer, "stats") else None
        if stats is not None and stats.step_s > 0:
            prefix = f"hvd_order/{place}/" if place else "hvd_order/"
            numbers |= {prefix + name: value for name, value in stats.as_dict().items()}
    return numbers
