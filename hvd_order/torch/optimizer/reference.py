"""A slow, readable reference for the results of ``DistributedOptimizer``.

It runs one blocking all-reduce for each parameter in ``step()``, and updates at once. It serves
readers and tests; it is correct for every optimizer and always slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.engine.job import process
from hvd_order.engine.requests.reduce_ops import Sum
from hvd_order.torch.collectives.single import allreduce, allreduce_

__all__ = ["ReferenceOptimizer"]


class ReferenceOptimizer:
    """Averages every gradient over the ranks, then updates."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Wraps ``optimizer``, whose parameters are equal on all ranks."""
        self.optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one synchronous step. A parameter that no rank used stays unchanged."""
        if closure is not None:
            return self.optimizer.step(lambda: self._evaluate(closure))
        self._average_gradients()
        return self.optimizer.step()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self._average_gradients()
        return allreduce(loss.detach())

    @torch.no_grad()
    def _average_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                users = torch.tensor(float(parameter.grad is not None))
                if allreduce(users, op=Sum) == 0:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad /= process.size()
                allreduce_(parameter.grad, op=Sum)
