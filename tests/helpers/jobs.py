"""Jobs with settings of their own in the processes of a `RankPool`, and scripts of jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch.distributed as dist

import hvd_order.torch as hvd

__all__ = ["default_group", "dies_between_the_halves", "new_job"]


@contextmanager
def new_job(env: Mapping[str, str]) -> Iterator[None]:
    """A job with these environment variables, in every rank of a pool."""
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        hvd.init()
        yield
        hvd.shutdown()
    hvd.init()  # without the variables, for the tests that follow in these processes


@contextmanager
def default_group(file: str) -> Iterator[None]:
    """The default process group of torch.distributed, for what needs it.

    Args:
        file: a new one, in which the ranks meet.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=hvd.rank(), world_size=hvd.size()
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


_BETWEEN = """
import sys
import torch
import hvd_order.torch as hvd

hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(), sharded=SHARDED
)
step = 0
try:
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        step += 1
        if step == 6:
            print("between the halves", flush=True)
            if hvd.rank() == 1:
                sys.stdin.read()  # until the end
        optimizer.step()
except hvd.HorovodInternalError as error:
    print(f"raised {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""


def dies_between_the_halves(sharded: bool) -> str:
    """A script whose rank 1 prints "between the halves" in step 6, and then waits to be killed.

    The other ranks end with 3 and print the error.
    """
    return f"SHARDED = {sharded}\n{_BETWEEN}"
