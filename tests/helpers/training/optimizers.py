"""Optimizers of tests."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Normed"]


class Normed(torch.optim.SGD):
    """Divides each update by the norm of its parameter's gradient, unless a group says not to."""

    hvd_order_separable = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    size = p.grad.norm() if group.get("normed", True) else 1.0
                    p.sub_(p.grad / size, alpha=group["lr"])
