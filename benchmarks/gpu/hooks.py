"""What the hooks of many small parameters cost the host."""

from __future__ import annotations

import statistics
import time

import torch
from common.ranks import finish
from finding import Finding

import hvd_order.torch as hvd

_LAYERS = 150  # a weight and a bias each
_ROUNDS = 30
_MOST_S = 3e-6  # for each parameter


def check_hooks(device: torch.device) -> Finding:
    """Host time of a backward pass of 300 small parameters, with hvd_order and without."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(_LAYERS))).to(device)
    x = torch.randn(8, 32, device=device)
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    alone_s = _backward_s(model, plain, x)
    wrapped = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    ours_s = _backward_s(model, wrapped, x)
    wrapped.flush()
    hook_s = (ours_s - alone_s) / (2 * _LAYERS)
    figures = {"backward_alone_s": alone_s, "backward_s": ours_s, "hook_s": hook_s}
    over = device.type == "cuda" and hook_s > _MOST_S
    text = (
        f"{1e6 * hook_s:.1f} us for each of {2 * _LAYERS} parameters (at most "
        f"{1e6 * _MOST_S:.0f}), whose backward takes {1e6 * alone_s / (2 * _LAYERS):.1f} us"
    )
    return Finding(text, figures, "the cost of a hook" if over else "")


def _backward_s(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Median host time of a backward pass; nothing else is under way when it begins."""
    taken = []
    for _ in range(5 + _ROUNDS):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        finish(x.device)
        begin = time.perf_counter()
        loss.backward()
        taken.append(time.perf_counter() - begin)
        optimizer.step()
        if hasattr(optimizer, "flush"):
            optimizer.flush()
    return statistics.median(taken[5:])
