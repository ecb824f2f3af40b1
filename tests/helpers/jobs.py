"""Jobs with settings of their own in the processes of a `RankPool`, and scripts of jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch.distributed as dist

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage

__all__ = [
    "SMALL",
    "calls_on_rank_0",
    "default_group",
    "dies_between_the_halves",
    "new_job",
    "refused",
]

# Slices that no number of ranks divides evenly, and some that are parts of one tensor.
SMALL = {"HVD_ORDER_SLICE_BYTES": "1000", "HVD_ORDER_CREDIT_BYTES": "3000"}


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


def refused(what: Callable[[], object], error: type[Exception] = InvalidUsage) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(error) as raised:
        what()
    return str(raised.value)


_ALONE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
import hvd_order.torch as hvd

hvd.init()
model = torch.nn.Linear(8, 8)
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters()), model.named_parameters(), sharded=True
)
for step in range(5):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if step == 3 and hvd.rank() == 0:
        getattr(optimizer, METHOD)()
"""


def calls_on_rank_0(method: str) -> str:
    """A script in which rank 0 alone calls a method of a sharded optimizer."""
    return f"METHOD = {method!r}\n{_ALONE}"


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
