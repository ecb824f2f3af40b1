"""Jobs with settings of their own in the processes of a `RankPool`, and scripts of jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
import torch.distributed as dist

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage

__all__ = [
    "SMALL",
    "default_group",
    "new_job",
    "on_hosts",
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
def on_hosts(hosts: Sequence[int]) -> Iterator[None]:
    """A job whose launcher says that the ranks are on these hosts; none: on those they are on."""
    env = {}
    if hosts:
        own = hosts[hvd.rank()]
        env["LOCAL_RANK"] = str(hosts[: hvd.rank()].count(own))
        env["LOCAL_WORLD_SIZE"] = str(hosts.count(own))
    with new_job(env):
        yield


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
