"""The state that an optimizer makes in its first step, as a place to load a checkpoint into."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.torch.updates.partial_step import InnerStep, with_groups

__all__: list[str] = []


def first_state(
    optimizer: Optimizer, step: InnerStep
) -> Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """A function that makes the state of a parameter by one update with zeros.

    The update has a gradient of zeros and the learning rate 0, as that by which
    torch.distributed.checkpoint makes state. It changes neither the optimizer nor its parameters.

    Args:
        step: from `partial_step.inner_step`.

    Returns:
        Takes a parameter of the optimizer and the elements to be updated, which it does not change;
        returns their state.
    """
    settings = {
        id(parameter): {key: _zero(key, value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }

    def make(parameter: torch.Tensor, elements: torch.Tensor) -> dict[str, Any]:
        values = torch.nn.Parameter(elements.detach().clone(), requires_grad=False)
        values.grad = torch.zeros_like(values)
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        group = {**settings[id(parameter)], "params": [values]}
        step(with_groups(optimizer, [group], state=state))
        return state[values]

    return make


def _zero(key: str, value: Any) -> Any:
    if key != "lr":
        return value
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0
