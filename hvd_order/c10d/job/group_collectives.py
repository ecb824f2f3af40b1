"""Collectives over a process group, whether torch.distributed lists it or not.

The functions of ``torch.distributed`` look groups up in a table (for the place of a rank, and once
more to report an error, which hides the error where the group is unknown); the methods of the
group do not. All block until done, and are called by all members together. Ranks are places in the
group.

Raises:
    RuntimeError: torch.distributed's, when a transfer fails.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_order import _torch as native

__all__: list[str] = []

_GROUPS_OWN_S = 0.0  # to torch.distributed: as long as the group's timeout says


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """Replaces a contiguous tensor by the reduction of all members' tensors."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    _finish(group.allreduce(real, op))


def broadcast(tensor: torch.Tensor, root: int, group: dist.ProcessGroup) -> None:
    """Overwrites a contiguous tensor with that of ``root``."""
    _finish(group.broadcast(tensor, root))


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All members' tensors, which are of one shape, by rank."""
    everyone = [torch.empty_like(tensor) for _ in range(group.size())]
    _finish(group.allgather(everyone, tensor))
    return everyone


def all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_counts: Sequence[int],
    sent_counts: Sequence[int],
    group: dist.ProcessGroup,
) -> None:
    """Sends so many elements to each rank, and gets so many from each; the tensors are flat."""
    _finish(group.alltoall_base(received, sent, list(received_counts), list(sent_counts)))


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """All members' values, by rank; of a group that carries CPU tensors."""
    data = _pickled(value)
    counts = [int(one) for one in all_gather(torch.tensor([data.numel()]), group)]
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: data.numel()] = data
    everyone = all_gather(padded, group)
    return [_unpickled(one[:count]) for one, count in zip(everyone, counts, strict=True)]


def share_object(value: Any, root: int, group: dist.ProcessGroup) -> Any:
    """The value of ``root``; that of others does not matter. As `gather_objects` otherwise."""
    mine = group.rank() == root
    data = _pickled(value) if mine else torch.empty(0, dtype=torch.uint8)
    count = torch.tensor([data.numel()])
    broadcast(count, root, group)
    if not mine:
        data = torch.empty(int(count), dtype=torch.uint8)
    broadcast(data, root, group)
    return value if mine else _unpickled(data)


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _finish(work: dist.Work | None) -> None:
    if work is not None:  # else the back end has waited itself
        native.wait_for(work, _GROUPS_OWN_S)
