"""One training step with each system that is compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.runner.workloads.trained import Workload


def _nothing() -> None:
    pass


@dataclass
class Trainer:
    """A system with a model of its own.

    Attributes:
        step: one training step.
        settled: whether it has ended its trials.
        flush: ends what its last step has left in flight.
        close: ends it, on all ranks.
        note: settings that it chose.
    """

    step: Callable[[], None]
    settled: Callable[[], bool] = lambda: True
    flush: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    note: Callable[[], str] = lambda: ""


def _trainer(
    work: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool, **more: Any
) -> Trainer:
    parameters = list(model.parameters())
    device = parameters[0].device.type

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(work.batch)
        loss.backward()
        if work.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, work.clip_norm)
        optimizer.step()

    return Trainer(step, **more)


def local(work: Workload, autocast: bool) -> Trainer:
    """No communication: what the step takes at least."""
    return _trainer(work, work.model, work.optimizer(list(work.model.parameters())), autocast)


def ddp(work: Workload, autocast: bool, bucket_mib: float = 25) -> Trainer:
    """DistributedDataParallel."""
    device = next(work.model.parameters()).device
    parallel = DistributedDataParallel(
        work.model, device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True,
    )  # fmt: skip
    optimizer = work.optimizer(list(parallel.parameters()))
    return _trainer(work, parallel, optimizer, autocast, note=lambda: f"{bucket_mib:g} MiB")


def fsdp2(work: Workload, autocast: bool) -> Trainer:
    """Fully sharded, block by block; parameters stay gathered between forward and backward."""
    from torch.distributed.fsdp import fully_shard

    lists = [module for module in work.model.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=len) if lists else next(work.model.children()).children()
    for block in blocks:
        if any(True for _ in block.parameters()):
            fully_shard(block, reshard_after_forward=False)
    fully_shard(work.model, reshard_after_forward=False)
    return _trainer(work, work.model, work.optimizer(list(work.model.parameters())), autocast)


def horovod(work: Workload, autocast: bool) -> Trainer:
    """Horovod's optimizer."""
    import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        work.optimizer(list(work.model.parameters())),
        named_parameters=work.model.named_parameters(),
    )
    inner = _trainer(work, work.model, optimizer, autocast)
    if work.clip_norm is None:
        return inner

    def step() -> None:
        optimizer.zero_grad()
        device = next(work.model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = work.model(work.batch)
        loss.backward()
        optimizer.synchronize()  # Horovod's way to clip: the gradients must be there
        nn.utils.clip_grad_norm_(work.model.parameters(), work.clip_norm or 0.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    return Trainer(step)


def hvd_order(work: Workload, autocast: bool) -> Trainer:
    """hvd_order's optimizer, with the settings of the environment."""
    import hvd_order.torch as hvd
    from hvd_order.engine import engine_host

    hvd.init()
    optimizer: Any = hvd.DistributedOptimizer(
        work.optimizer(list(work.model.parameters())),
        named_parameters=work.model.named_parameters(),
    )
    host = engine_host.running_host()
    assert host is not None

    def note() -> str:
        settings = host.slice_settings
        in_flight = settings.credit_bytes // settings.slice_bytes
        awaited = "" if settings.cross_iteration else ", awaited in step()"
        return (
            f"{settings.slice_bytes >> 10} KiB x {in_flight}, {settings.policy}, "
            f"{host.agreement}{awaited}"
        )

    def close() -> None:
        optimizer.flush()
        hvd.shutdown()

    return _trainer(
        work, work.model, optimizer, autocast, settled=lambda: host.settled,
        flush=optimizer.flush, close=close, note=note,
    )  # fmt: skip


SYSTEMS: dict[str, Callable[..., Trainer]] = {
    "ddp": ddp,
    "ddp_tuned": ddp,
    "fsdp2": fsdp2,
    "horovod": horovod,
    "hvd_order": hvd_order,
}
TUNED_BUCKETS_MIB = (1, 5, 25, 100)
"""What `ddp_tuned` tries; it takes the fastest."""
