"""The systems under comparison: how each makes a workload train in parallel.

All get the same workload; each is used as its own documentation says.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.runner.workloads.workload import Workload

_SLICE_BYTES = 1 << 20

DdpHook = Callable[[nn.parallel.DistributedDataParallel], object]


def _nothing() -> None:
    """There is nothing to do."""


@dataclass
class Trainer:
    """One system with its workload.

    Attributes:
        step: forward, backward, update; returns when the next step may begin.
        finish: completes what is outstanding; afterwards the model may be read.
        settled: whether it has tuned itself; the same on all ranks after the same step.
        close: gives back what the system holds.
        note: what a reader of the results has to know, once the system has settled.
        messages: messages of the order agreement that this rank has sent since the last call.
        state_bytes: of optimizer state and master copies on this rank.
        saved_bytes: what codes save of each gradient, by the name of its parameter.
    """

    step: Callable[[], None]
    finish: Callable[[], None] = _nothing
    settled: Callable[[], bool] = lambda: True
    close: Callable[[], None] = _nothing
    note: Callable[[], str] = lambda: ""
    messages: Callable[[], int] = lambda: 0
    state_bytes: Callable[[], int] = lambda: 0
    saved_bytes: Callable[[], dict[str, int]] = dict


def _trainer(
    work: Workload,
    forward: nn.Module,
    optimizer: Any,
    masters: Sequence[torch.Tensor] = (),
    before_clip: Callable[[], None] = _nothing,
    update: Callable[[], None] | None = None,
    **more: Any,
) -> Trainer:
    """The loop that all systems share.

    Args:
        forward: the model, as the system wraps it.
        masters: float32 copies of the weights, which the optimizer updates, if the loop keeps any.
        before_clip: what a system asks for before gradients are clipped.
        update: in place of ``optimizer.step``.
    """
    weights = list(work.model.parameters())
    device = weights[0].device.type
    scaler = torch.amp.GradScaler(device, init_scale=256.0) if work.scaled else None

    def step() -> None:
        (work.model if masters else optimizer).zero_grad()
        with torch.autocast(device, torch.bfloat16) if work.autocast else contextlib.nullcontext():
            loss = forward(work.batch()).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        for master, weight in zip(masters, weights, strict=bool(masters)):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if work.max_norm is not None:
            before_clip()
            nn.utils.clip_grad_norm_(masters or forward.parameters(), work.max_norm)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            (update or optimizer.step)()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(weights, list(masters))

    def state_bytes() -> int:
        state = [
            value.nbytes
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ]
        return sum(state) + sum(master.nbytes for master in masters)

    return Trainer(step, **{"state_bytes": state_bytes, **more})


def _optimizer(work: Workload) -> torch.optim.Optimizer:
    return work.optimizer(list(work.model.parameters()))


def local(work: Workload) -> Trainer:
    """No communication."""
    return _trainer(work, work.model, _optimizer(work))


def no_waiting(work: Workload) -> Trainer:
    """The local step beside as many bytes as its gradients have, for which nothing waits.

    No system that moves these bytes on this machine can be faster: what it takes longer than the
    optimum is the price of sharing cores with the network.
    """
    reduce = saturated_all_reduce(sum(p.nbytes for p in work.model.parameters()))
    return _beside(local(work).step, reduce)


def no_waiting_halves(work: Workload) -> Trainer:
    """As `no_waiting`, with the bytes in slices and halves, as split all-reduces send them."""
    import hvd_order.torch as hvd
    from hvd_order._native import _torch as native
    from hvd_order.engine.engine_host import engine_host
    from hvd_order.engine.half_forms import choose_half_forms
    from hvd_order.engine.model_channel import ModelChannel

    hvd.init()
    host = engine_host(0, range(hvd.size()))
    channel = ModelChannel(host, "no_waiting_halves")
    with channel.turn():
        choose_half_forms(channel, torch.device("cpu"))
    size_bytes = sum(p.nbytes for p in work.model.parameters())
    pieces = list(torch.zeros(size_bytes // 4).split(_SLICE_BYTES // 4))
    thread = ThreadPoolExecutor(1)

    def travel() -> None:
        for half in (native.Operation.REDUCE_SCATTER, native.Operation.ALL_GATHER):
            host.transport.time_stream(pieces, 2, half)

    def begin() -> Callable[[], None]:
        travelling: Future[None] = thread.submit(travel)
        return lambda: travelling.result()

    return _beside(local(work).step, begin, close=hvd.shutdown)


def _beside(
    step: Callable[[], None], begin: Callable[[], Callable[[], None]], **more: Any
) -> Trainer:
    """A step beside a transfer; ``begin`` starts one and returns what waits for its end."""
    travelling: list[Callable[[], None]] = []

    def both() -> None:
        travelling.append(begin())
        step()
        if len(travelling) > 1:  # the link never idles between steps
            travelling.pop(0)()

    def finish() -> None:
        while travelling:
            travelling.pop(0)()

    return Trainer(both, finish, **more)


def ddp(work: Workload, bucket_mib: float = 25, hook: DdpHook | None = None) -> Trainer:
    """DistributedDataParallel; the loop keeps master copies, as mixed-precision trainers do.

    Args:
        hook: registers a communication hook.
    """
    weights = list(work.model.parameters())
    device = weights[0].device
    masters = [weight.detach().float() for weight in weights] if work.masters else []
    parallel = nn.parallel.DistributedDataParallel(
        work.model, device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True,
    )  # fmt: skip
    if hook is not None:
        hook(parallel)
    optimizer = work.optimizer(masters or weights)
    return _trainer(
        work,
        parallel,
        optimizer,
        masters,
        note=lambda: f"{bucket_mib:g} MiB" if bucket_mib < 1e6 else "one bucket",
    )


def ddp_bf16(work: Workload) -> Trainer:
    """DistributedDataParallel with torch's hook that sends gradients as bfloat16."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    # DDP refuses the hook by its name where NCCL does not sum; Gloo can.
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.bf16_compress_hook(state, bucket)

    hook.__annotations__ = {}
    return ddp(work, hook=lambda parallel: parallel.register_comm_hook(None, hook))


def ddp_powersgd(work: Workload, rank: int = 2) -> Trainer:
    """DistributedDataParallel with torch's PowerSGD hook, from its eleventh step on.

    One bucket: the hook calls its later collectives from callbacks, and with several buckets ranks
    call them in different orders, which Gloo answers by ending the process.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=10
    )
    return ddp(work, 1e6, lambda p: p.register_comm_hook(state, powerSGD_hook.powerSGD_hook))


def fsdp2(work: Workload) -> Trainer:
    """Parameters stay gathered between forward and backward: the fastest setting."""
    from torch.distributed.fsdp import fully_shard

    for block in work.blocks or work.model.children():
        if any(True for _ in block.parameters()):
            fully_shard(block, reshard_after_forward=False)
    fully_shard(work.model, reshard_after_forward=False)
    return _trainer(work, work.model, _optimizer(work))


def hvd_order(
    work: Workload,
    env: dict[str, str] | None = None,
    sharded: bool = False,
    compression: str = "none",
) -> Trainer:
    """Joins the process group that exists; ``env`` are its knobs, None: those that are set."""
    if env is not None:
        for name in [name for name in os.environ if name.startswith("HVD_ORDER_")]:
            del os.environ[name]
        os.environ.update(env)
    import hvd_order.torch as hvd
    from hvd_order.engine import engine_host

    hvd.init()
    hvd.broadcast_parameters(work.model.state_dict(), root_rank=0)
    optimizer: Any = hvd.DistributedOptimizer(
        _optimizer(work), named_parameters=work.model.named_parameters(), sharded=sharded,
        compression=getattr(hvd.Compression, compression),
    )  # fmt: skip
    host = engine_host.running_host()
    assert host is not None

    def note() -> str:
        settings = host.slice_settings
        in_flight = settings.credit_bytes // settings.slice_bytes
        awaited = "" if settings.cross_iteration else ", awaited in step()"
        return (
            f"{settings.slice_bytes >> 10} KiB x {in_flight}, {settings.policy}, "
            f"{host.agreement}{awaited}"
            + (f", {len(optimizer.compression_report())} in codes" if settings.coded else "")
        )

    def close() -> None:
        optimizer.flush()
        hvd.shutdown()

    def saved_bytes() -> dict[str, int]:
        return {each.name: each.saved_bytes for each in optimizer.compression_report()}

    more: dict[str, Any] = {}
    if sharded:
        shards = optimizer._hvd_exchange.shards
        more["state_bytes"] = lambda: int(shards.size_bytes)
    return _trainer(
        work, work.model, optimizer, finish=optimizer.flush, settled=lambda: host.tuning_ended,
        close=close, note=note, messages=lambda: host.engine.take_counts()[0],
        saved_bytes=saved_bytes, **more,
    )  # fmt: skip


def sharded(work: Workload, env: dict[str, str] | None = None) -> Trainer:
    """hvd_order with sharded optimizer state, which keeps its own master copies."""
    return hvd_order(work, env, sharded=True)


def int8(work: Workload, env: dict[str, str] | None = None) -> Trainer:
    """hvd_order with all gradients in 8 bits that can be."""
    return hvd_order(work, env, compression="int8")


def auto(work: Workload, env: dict[str, str] | None = None) -> Trainer:
    """hvd_order with those gradients in 8 bits for which the step waits."""
    return hvd_order(work, env, compression="auto")


def horovod(work: Workload) -> Trainer:
    """Horovod's optimizer."""
    import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        _optimizer(work), named_parameters=work.model.named_parameters()
    )
    if work.max_norm is None:
        return _trainer(work, work.model, optimizer)

    def update() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    # Horovod's documentation asks for these two around clipping.
    return _trainer(work, work.model, optimizer, before_clip=optimizer.synchronize, update=update)


SYSTEMS: dict[str, Callable[..., Trainer]] = {
    "local": local,
    "no_waiting": no_waiting,
    "no_waiting_halves": no_waiting_halves,
    "ddp": ddp,
    "ddp_bf16": ddp_bf16,
    "ddp_powersgd": ddp_powersgd,
    "ddp_powersgd4": functools.partial(ddp_powersgd, rank=4),
    "fsdp2": fsdp2,
    "hvd_order": hvd_order,
    "int8": int8,
    "auto": auto,
    "sharded": sharded,
    "horovod": horovod,
}


def saturated_all_reduce(
    size_bytes: int, chunk_bytes: int = 8 << 20
) -> Callable[[], Callable[[], None]]:
    """An all-reduce of so many bytes that never lets the link idle: the wire time's yardstick.

    Returns:
        What begins one, and returns what waits for its end.
    """
    flat = torch.zeros(size_bytes // 4)
    chunks = flat.split(chunk_bytes // 4)

    def begin() -> Callable[[], None]:
        works = [dist.all_reduce(chunk, async_op=True) for chunk in chunks]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    return begin
