"""The systems under comparison: how each makes a model train in parallel.

All get the same model and plain SGD; each is used as its own documentation says. ``max_norm`` is
that of clipping by the global norm; None: gradients are not clipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.runner.language_loops import LanguageLoop

_LEARNING_RATE = 1e-2
_SLICE_BYTES = 1 << 20


@dataclass
class Trainer:
    """One system with its model.

    Attributes:
        step: forward, backward, update; returns when the next step may begin.
        finish: completes what is outstanding; afterwards the model may be read.
        settled: whether it has tuned itself; the same on all ranks after the same step.
        close: gives back what the system holds.
        note: what a reader of the results has to know, once the system has settled.
        messages: messages of the order agreement that this rank has sent since the last call.
        state_bytes: of optimizer state and master copies on this rank, where a loop counts them.
    """

    step: Callable[[], None]
    finish: Callable[[], None]
    settled: Callable[[], bool] = lambda: True
    close: Callable[[], None] = lambda: None
    note: Callable[[], str] = lambda: ""
    messages: Callable[[], int] = lambda: 0
    state_bytes: Callable[[], int] = lambda: 0


def _sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, foreach=True)


def _loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], torch.Tensor],
    max_norm: float | None,
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(batch()).sum().backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()

    return step


def _nothing() -> None:
    """There is nothing to finish."""


def local(
    model: torch.nn.Module,
    batch: Callable[[], torch.Tensor],
    max_norm: float | None = None,
    **_: Any,
) -> Trainer:
    """No communication."""
    return Trainer(_loop(model, _sgd(model), batch, max_norm), _nothing)


def no_waiting(
    model: torch.nn.Module,
    batch: Callable[[], torch.Tensor],
    max_norm: float | None = None,
    **_: Any,
) -> Trainer:
    """The local step beside as many bytes as its gradients have, for which nothing waits.

    No system that moves these bytes on this machine can be faster: what it takes longer than the
    optimum is the price of sharing cores with the network.
    """
    step = _loop(model, _sgd(model), batch, max_norm)
    reduce = saturated_all_reduce(sum(p.numel() * p.element_size() for p in model.parameters()))
    travelling: list[Callable[[], None]] = []

    def step_beside() -> None:
        travelling.append(reduce())
        step()
        if len(travelling) > 1:  # the link never idles between steps
            travelling.pop(0)()

    def finish() -> None:
        while travelling:
            travelling.pop(0)()

    return Trainer(step_beside, finish)


def no_waiting_halves(
    model: torch.nn.Module,
    batch: Callable[[], torch.Tensor],
    max_norm: float | None = None,
    **_: Any,
) -> Trainer:
    """As `no_waiting`, with the bytes in slices and halves, as split all-reduces send them."""
    import hvd_order.torch as hvd
    from hvd_order._native import _torch as native
    from hvd_order.engine.engine_host import engine_host
    from hvd_order.engine.half_forms import choose_half_forms

    hvd.init()
    host = engine_host(0, range(hvd.size()))
    choose_half_forms(host, torch.device("cpu"))
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    pieces = list(torch.zeros(size_bytes // 4).split(_SLICE_BYTES // 4))
    step = _loop(model, _sgd(model), batch, max_norm)
    thread = ThreadPoolExecutor(1)
    travelling: list[Future[None]] = []

    def travel() -> None:
        for half in (native.Operation.REDUCE_SCATTER, native.Operation.ALL_GATHER):
            host.transport.time_stream(pieces, 2, half)

    def step_beside() -> None:
        travelling.append(thread.submit(travel))
        step()
        if len(travelling) > 1:  # the link never idles between steps
            travelling.pop(0).result()

    def finish() -> None:
        while travelling:
            travelling.pop(0).result()

    return Trainer(step_beside, finish, close=hvd.shutdown)


def ddp(
    model: torch.nn.Module,
    batch: Callable[[], torch.Tensor],
    bucket_mib: float = 25,
    max_norm: float | None = None,
    **_: Any,
) -> Trainer:
    parallel = torch.nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True
    )
    loop = _loop(parallel, _sgd(parallel), batch, max_norm)
    return Trainer(loop, _nothing, note=lambda: f"{bucket_mib:g} MiB")


def fsdp2(
    model: torch.nn.Module,
    batch: Callable[[], torch.Tensor],
    max_norm: float | None = None,
    **_: Any,
) -> Trainer:
    """Parameters stay gathered between forward and backward: the fastest setting."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    return Trainer(_loop(model, _sgd(model), batch, max_norm), _nothing)


def hvd_order(
    model: torch.nn.Module,
    batch: Callable[[], torch.Tensor],
    env: dict[str, str] | None = None,
    max_norm: float | None = None,
    **_: Any,
) -> Trainer:
    """Joins the process group that exists; ``env`` sets its knobs."""
    for name in [name for name in os.environ if name.startswith("HVD_ORDER_")]:
        del os.environ[name]
    os.environ.update(env or {})
    import hvd_order.torch as hvd
    from hvd_order.engine import engine_host

    hvd.init()
    optimizer: Any = hvd.DistributedOptimizer(
        _sgd(model), named_parameters=model.named_parameters()
    )
    host = engine_host.running_host()
    assert host is not None

    def note() -> str:
        settings = host.slice_settings
        in_flight = settings.credit_bytes // settings.slice_bytes
        awaited = "" if getattr(settings, "cross_iteration", True) else ", awaited in step()"
        return (
            f"{settings.slice_bytes >> 10} KiB x {in_flight}, {settings.policy}, "
            f"{host.agreement}{awaited}"
        )

    def messages() -> int:
        # Checkouts from before it could be counted give none.
        return host.engine.take_counts()[0] if hasattr(host.engine, "take_counts") else 0

    return Trainer(
        _loop(model, optimizer, batch, max_norm), optimizer.flush, lambda: host.settled,
        hvd.shutdown, note, messages,
    )  # fmt: skip


def horovod(
    model: torch.nn.Module,
    batch: Callable[[], torch.Tensor],
    max_norm: float | None = None,
    **_: Any,
) -> Trainer:
    import horovod.torch as hvd

    optimizer = hvd.DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters())
    if max_norm is None:
        return Trainer(_loop(model, optimizer, batch, None), _nothing)

    def step() -> None:
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.synchronize()  # Horovod's documentation asks for these two around clipping
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        with optimizer.skip_synchronize():
            optimizer.step()

    return Trainer(step, _nothing)


def language_loop(
    model: torch.nn.Module,
    batch: Callable[[], torch.Tensor],
    max_norm: float,
    loop: dict[str, Any],
) -> Trainer:
    """See language_loops.py; ``loop`` has the options."""
    made = LanguageLoop(model, batch, max_norm=max_norm, **loop)
    return Trainer(made.step, made.finish, made.settled, made.close, state_bytes=made.state_bytes)


SYSTEMS: dict[str, Callable[..., Trainer]] = {
    "local": local,
    "no_waiting": no_waiting,
    "no_waiting_halves": no_waiting_halves,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "hvd_order": hvd_order,
    "horovod": horovod,
    "language_loop": language_loop,
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
