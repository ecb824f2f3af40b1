"""Elastic training with Horovod's names: ``hvd.elastic.run``, ``TorchState``, ``ElasticSampler``.

When a worker dies or a host joins, the elastic agent (``hvd-order run --min-np``, ``torchrun
--nnodes MIN:MAX --max-restarts N``) restarts all workers, and training continues from the last
commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_order.base.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvd_order.engine.job import process
from hvd_order.engine.process_sets import init
from hvd_order.launch.elastic.run import rejoin, run_fn
from hvd_order.launch.elastic.state import ObjectState, State
from hvd_order.torch.elastic.sampler import ElasticSampler
from hvd_order.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the training function of an elastic job.

    Before `func` starts, all ranks get the same state: that of the last commit, or rank 0's before
    the first commit. The script must not call a collective before `func`, and must create model,
    optimizer and state anew on each start.

    Args:
        func: takes the `State` first, and trains from the point that the state describes.

    Returns:
        A function with the same arguments, which returns what `func` returns.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    rejoin(process.size(), process.shutdown, init)
