"""Collectives over a process group, whether torch.distributed lists the group or not.

The functions of ``torch.distributed`` look groups up in a table (for the place of a rank, and
again to report an error, which hides the error if the group is unknown); the methods of the group
do not. All functions block until done, and all members call them together. Ranks are places in the
group.

Raises:
    RuntimeError: torch.distributed's error, when a transfer fails.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_order import _torch as native

__all__: list[str] = []

_GROUPS_OWN_S = 0.0  # torch.distributed's value for the timeout of the group


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """Replaces a contiguous tensor by the reduction of all members' tensors."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    _finish(group.allreduce(real, op))


def broadcast(tensor: torch.Tensor, root: int, group: dist.ProcessGroup) -> None:
    """Overwrites a contiguous tensor with that of ``root``."""
    _finish(group.broadcast(tensor, root))


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Returns all members' tensors, which have one shape, by rank."""
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
    """Sends `sent_counts` elements to, and receives `received_counts` from, each rank; flat
    tensors.
    """
    _finish(group.alltoall_base(received, sent, list(received_counts), list(sent_counts)))


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns all members' values, by rank; the group must carry CPU tensors."""
    data = _pickled(value)
    counts = [int(one) for one in all_gather(torch.tensor([data.numel()]), group)]
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: data.numel()] = data
    everyone = all_gather(padded, group)
    return [_unpickled(one[:count]) for one, count in zip(everyone, counts, strict=True)]


def share_object(value: Any, root: int, group: dist.ProcessGroup) -> Any:
    """Returns the value of ``root``; the other ranks' values are ignored. See `gather_objects`."""
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
    return pickle.loads(bytes_of(data))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Copies the memory of a contiguous CPU tensor. PyTorch's own way needs numpy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def _finish(work: dist.Work | None) -> None:
    if work is not None:  # None: the backend has waited itself
        native.wait_for(work, _GROUPS_OWN_S)
