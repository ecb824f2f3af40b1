"""What the hooks of many small parameters cost the host."""

from __future__ import annotations

import statistics
import time
from math import nan

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_order.torch as hvd
from benchmarks.engine.gpu.finding import Finding
from benchmarks.runner.ranks import finish

_LAYERS = 150  # a weight and a bias each
_ROUNDS = 30
_MOST_S = 3e-6  # for each parameter


def check_hooks(device: torch.device) -> Finding:
    """Host time of a backward pass of 300 small parameters, in four ways."""
    figures = {}
    ways = dict(_WAYS)
    if device.type not in ("cuda", "cpu"):
        del ways["DDP"]  # it crashes on devices that it does not know
    for name, wrap in ways.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(_LAYERS))).to(device)
        used, optimizer = wrap(model)
        figures[f"backward_{name}_s"] = _backward_s(used, optimizer, device)
    each = {
        name: (figures[f"backward_{name}_s"] - figures["backward_alone_s"]) / (2 * _LAYERS)
        for name in ways
    }
    figures |= {f"{name}_hook_s": seconds for name, seconds in each.items()}
    over = device.type == "cuda" and each["hvd_order"] > _MOST_S
    text = (
        f"{1e6 * each['hvd_order']:.1f} us for each of {2 * _LAYERS} parameters (at most "
        f"{1e6 * _MOST_S:.0f}), DDP {1e6 * each.get('DDP', nan):.1f} us, a hook that does nothing "
        f"{1e6 * each['empty']:.1f} us; the backward of one takes "
        f"{1e6 * figures['backward_alone_s'] / (2 * _LAYERS):.1f} us"
    )
    return Finding(text, figures, "the cost of a hook" if over else "")


_Wrapped = tuple[torch.nn.Module, torch.optim.Optimizer]


def _plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def _alone(model: torch.nn.Module) -> _Wrapped:
    return model, _plain(model)


def _empty(model: torch.nn.Module) -> _Wrapped:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    return model, _plain(model)


def _ddp(model: torch.nn.Module) -> _Wrapped:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return DistributedDataParallel(model, gradient_as_bucket_view=True), _plain(model)


def _ours(model: torch.nn.Module) -> _Wrapped:
    optimizer = hvd.DistributedOptimizer(_plain(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, optimizer


_WAYS = {"alone": _alone, "empty": _empty, "DDP": _ddp, "hvd_order": _ours}


def _backward_s(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> float:
    """Median host time of a backward pass; nothing else is under way when it begins."""
    x = torch.randn(8, 32, device=device)
    taken = []
    for _ in range(5 + _ROUNDS):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        finish(device)
        begin = time.perf_counter()
        loss.backward()
        taken.append(time.perf_counter() - begin)
        optimizer.step()
        if hasattr(optimizer, "flush"):
            optimizer.flush()
    return statistics.median(taken[5:])
