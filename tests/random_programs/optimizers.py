"""Optimizers that programs draw: of torch, and of the kinds that people write themselves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Counting(torch.optim.SGD):
    """Keeps the number of its steps on itself, and its rate follows it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.steps)
        return super().step(closure)


class Attributed(torch.optim.SGD):
    """A factor that is an attribute; a schedule of the user's sets it between steps."""

    factor = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.factor)


class ClippingInside(torch.optim.SGD):
    """Clips by the norm of all gradients inside of ``step()``, at a limit that is high for toys."""

    limit = 3.0

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if gradients:
            norm = torch.nn.utils.get_total_norm(gradients)
            scale = float((self.limit / norm).clamp(max=1.0))
            for gradient in gradients:
                gradient.mul_(scale)
        return super().step(closure)


class SkippingLarge(torch.optim.SGD):
    """Leaves out the whole step if a gradient is too large, as others do if it is infinite."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if any(float(gradient.abs().max()) > 1.0 for gradient in gradients):
            return None
        return super().step(closure)


class Lookahead(Optimizer):
    """Holds another optimizer, whose groups and state it shares (as in timm)."""

    def __init__(self, base: Optimizer, every: int = 2, alpha: float = 0.5) -> None:
        self._base = base
        self.defaults = base.defaults
        self.param_groups = base.param_groups
        self.state = base.state
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._patch_step_function()
        self.every, self.alpha, self.count = every, alpha, 0
        self.slow: dict[Tensor, Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        loss = self._base.step(closure)
        self.count += 1
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                slow = self.slow.setdefault(p, p.detach().clone())
                if self.count % self.every == 0:
                    slow.lerp_(p, self.alpha)
                    p.copy_(slow)
        return loss


class Noisy(torch.optim.SGD):
    """Adds noise from the global generator (Langevin): whoever draws in between must not notice."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
        return super().step(closure)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": parameters[::2], "lr": 0.05},
        {"params": parameters[1::2], "lr": 0.02, "weight_decay": 0.01},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov_foreach": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True
    ),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.02),
    "adam_two_groups": lambda m: torch.optim.Adam(two_groups(m), lr=0.02),
    "adam_tensor_lr": lambda m: torch.optim.Adam(
        m.parameters(), lr=torch.tensor(0.02, dtype=torch.float64)
    ),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, fused=True, amsgrad=True),
    "sgd_two_groups": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.5),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=1.0),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.02),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.02),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.02),
    "counting": lambda m: Counting(m.parameters(), lr=0.1),
    "attributed": lambda m: Attributed(m.parameters(), lr=0.05),
    "clipping_inside": lambda m: ClippingInside(m.parameters(), lr=0.05),
    "skipping_large": lambda m: SkippingLarge(m.parameters(), lr=0.05),
    "lookahead": lambda m: Lookahead(torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)),
    "noisy": lambda m: Noisy(m.parameters(), lr=0.05),
}


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    return OPTIMIZERS[name](model)


# torch puts hooks around ``step`` of a class when the first of its kind is made. A class that calls
# its parent's ``step`` runs hooks twice or once by that: here always twice, in every process.
for _make in OPTIMIZERS.values():
    _make(nn.Linear(2, 2))
