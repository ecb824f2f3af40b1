"""Scripts of ranks whose tensors lie on the test device."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from helpers.ranks import Completed, run_script

__all__ = ["build", "run_on_device"]


@functools.cache
def build() -> None:
    """Builds the device in another process: here it would be a device for all tests."""
    command = [sys.executable, "-c", "from helpers.device.test_device import load; load()"]
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[2])


_START = """
import torch
import torch.distributed as dist
from helpers.device.test_device import NAME, gradient_group, load

device = load()
dist.init_process_group(f"cpu:gloo,{NAME}:{NAME}")
import hvd_order.torch as hvd
from hvd_order._native import _torch as native
if KERNELS:
    native.register_kernels(NAME, device.kernels())
hvd.init()
rank, size = hvd.rank(), hvd.size()


def network(layers=4, width=16, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]).to(NAME)


def wrapped(model, **options):
    return hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        named_parameters=model.named_parameters(), **options,
    )


def batch(step, width=16):
    rows = torch.Generator().manual_seed(step)
    return torch.randn(8, width, generator=rows)[rank::size].to(NAME)


def backward(model, optimizer, step):
    optimizer.zero_grad()
    model(batch(step)).square().mean().backward()


def train(model, optimizer, steps, begin=0):
    for step in range(begin, begin + steps):
        backward(model, optimizer, step)
        optimizer.step()


def weights(model):
    return [p.detach().cpu() for p in model.parameters()]


def check_weights(found, train=train, steps=8, **tolerance):
    # They are those of one process; returns what `train` returns there.
    global rank, size
    place, (rank, size) = (rank, size), (0, 1)
    alone = network()
    seen = train(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), steps)
    for mine, wanted in zip(found, weights(alone)):
        torch.testing.assert_close(mine, wanted, **tolerance)
    rank, size = place
    return seen


"""


def run_on_device(
    body: str,
    *,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    kernels: bool = True,
    killed: int | None = None,
) -> list[Completed]:
    """Runs `body`, a script without indentation, on each rank, and returns how the ranks ended.

    Without ``kernels`` torch operators take their place, as on a machine where nvcc was not found.

    The rank ``killed`` must end by SIGKILL, every other one with 0.

    The names of `_START` above are defined there. Trials are off, so that updates are deferred
    from the third step on.
    """
    build()
    settings = {"HVD_ORDER_TUNE": "0", "HVD_ORDER_TIMEOUT": "20", **(env or {})}
    script = f"KERNELS = {kernels}\n" + _START + textwrap.dedent(body)
    ended = run_script(ranks, script, env=settings, timeout=timeout)
    for rank, one in enumerate(ended):
        assert one.returncode == (-signal.SIGKILL if rank == killed else 0), one.stderr
    return ended
