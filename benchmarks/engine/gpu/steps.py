"""Training steps of a GPT in bfloat16: their time, the device's gaps, and the host's."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_order.torch as hvd
from benchmarks.engine.gpu.finding import Finding
from benchmarks.runner.ranks import finish, slowest
from hvd_order.planning.steps.efficiency import busy_s
from hvd_order.tools.demo.gpt import Gpt, GptConfig, next_token_loss

_WARM_UP = 6
_STEPS = 12
_PROFILED = 4
_LARGE = GptConfig(vocabulary=50304, context=512, layers=12, heads=12, width=768)
_SEQUENCES = 8


def train_alone(device: torch.device) -> Finding:
    """Without exchange; both ranks at once, as they share a GPU if there is one only."""
    return _train(device, lambda model: (model, _optimizer(model)))


def train_ddp(device: torch.device) -> Finding:
    """With torch's DistributedDataParallel."""

    def wrap(model: Gpt) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        if not dist.is_initialized():  # hvd_order has no default group where it chose the back end
            dist.init_process_group("gloo")
        ids = [device.index] if device.type == "cuda" else None
        replica = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        return replica, _optimizer(model)

    return _train(device, wrap)


def train_ours(device: torch.device) -> Finding:
    """With hvd_order, as the variables say."""

    def wrap(model: Gpt) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        named = model.named_parameters()
        return model, hvd.DistributedOptimizer(_optimizer(model), named_parameters=named)

    return _train(device, wrap)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _train(
    device: torch.device,
    wrap: Callable[[Gpt], tuple[torch.nn.Module, torch.optim.Optimizer]],
) -> Finding:
    shape = _LARGE
    if device.type != "cuda":  # to try it
        shape = dataclasses.replace(_LARGE, vocabulary=256, context=32, layers=2, heads=2, width=64)
    torch.manual_seed(1)
    small = Gpt(shape).to(device)
    used, optimizer = wrap(small.bfloat16() if device.type == "cuda" else small)
    tokens = torch.randint(shape.vocabulary, (_SEQUENCES, shape.context + 1), device=device)

    def step() -> None:
        next_token_loss(used(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(_WARM_UP):
        step()
    finish(device)
    hvd.barrier()
    begin, begin_of_thread = time.perf_counter(), time.thread_time()
    for _ in range(_STEPS):
        step()
    host_s, worked_s = time.perf_counter() - begin, time.thread_time() - begin_of_thread
    finish(device)
    step_s = (time.perf_counter() - begin) / _STEPS
    figures = {
        "step_s": slowest([step_s])[0],
        "host_waits_share": max(0.0, 1 - worked_s / host_s),
        "parameters": sum(p.numel() for p in small.parameters()),
    }
    if device.type == "cuda":
        figures["gaps_share"] = _gaps(step)
    if hasattr(optimizer, "flush"):
        optimizer.flush()
    return Finding("", figures)


def _gaps(step: Callable[[], None]) -> float:
    """Share of the time in which no kernel of this process ran, by the profiler."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_PROFILED):
            step()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not spans:
        return 1.0
    begins, ends = zip(*spans, strict=True)
    return 1 - busy_s(spans) / (max(ends) - min(begins))


def judge(found: Mapping[str, Finding]) -> Finding:
    """A row for each way to train."""
    alone_s = found["none"].figures["step_s"]
    figures = {f"{name}_{key}": value
               for name, one in found.items() for key, value in one.figures.items()}  # fmt: skip
    rows = []
    for name, one in found.items():
        gaps = one.figures.get("gaps_share")
        shown = "" if gaps is None else f", gaps {gaps:.0%}"
        rows.append(
            f"{name} {1e3 * one.figures['step_s']:.1f} ms"
            f" ({one.figures['step_s'] / alone_s:.2f} of none){shown}"
            f", host waits {one.figures['host_waits_share']:.0%}"
        )
    return Finding("; ".join(rows), figures)
