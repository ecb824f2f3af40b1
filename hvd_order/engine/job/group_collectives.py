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
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_order._native import _torch as native
from hvd_order.base.errors import HorovodInternalError

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


def gather_objects(value: Any, group: dist.ProcessGroup, what: str = "objects") -> list[Any]:
    """Returns all members' values, by rank.

    Unlike torch.distributed's ``all_gather_object``, it needs no numpy.

    Raises:
        HorovodInternalError: a member sent something else; names its place.
    """
    everyone = gather_bytes(pickled(value), group, what)
    return [unpickled(data, place, what) for place, data in enumerate(everyone)]


def gather_bytes(mine: bytes, group: dist.ProcessGroup, what: str) -> list[bytes]:
    """Returns what all members sent; see `gather_objects`."""
    device = _device_of(group)
    heads = all_gather(head_of(mine, what).to(device), group)
    counts = [count_in(head.tolist(), place, what) for place, head in enumerate(heads)]
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    if mine:
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyone = all_gather(padded.to(device), group)
    return [bytes_of(one[:count].cpu()) for one, count in zip(everyone, counts, strict=True)]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """The CPU, or a device whose tensors the group carries, if it carries none of the CPU."""
    carried = group._device_types
    cpu = torch.device("cpu")
    return cpu if cpu in carried or not carried else carried[0]


def share_object(value: Any, root: int, group: dist.ProcessGroup, what: str = "an object") -> Any:
    """Returns the value of ``root``; the other ranks' values are ignored.

    The group must carry CPU tensors.

    Raises:
        HorovodInternalError: ``root`` sent something else.
    """
    mine = group.rank() == root
    data = pickled(value) if mine else b""
    head = head_of(data, what)
    broadcast(head, root, group)
    count = count_in(head.tolist(), root, what)
    content = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if mine
        else torch.empty(count, dtype=torch.uint8)
    )
    broadcast(content, root, group)
    return value if mine else unpickled(bytes_of(content), root, what)


# What is about to be sent: a number that nothing else begins with, what it is, and its bytes.
_HEAD = 0x6876646F_6F626A31
_MOST_BYTES = 1 << 36  # beyond what a model's state takes; a count above it is none


def head_of(data: bytes, what: str) -> torch.Tensor:
    """The head that is sent before ``data``."""
    return torch.tensor([_HEAD, zlib.crc32(what.encode()), len(data)])


def count_in(head: Sequence[int], sender: int, what: str) -> int:
    """Returns the count of bytes in a member's head.

    Raises:
        HorovodInternalError: it is no head, or that of something else.
    """
    start, kind, count = head
    problem = None
    if start != _HEAD:
        problem = "it does not begin as such a message does"
    elif kind != zlib.crc32(what.encode()):
        problem = "it is about something else"
    elif not 0 <= count <= _MOST_BYTES:
        problem = f"it claims to have {count} bytes"
    if problem is not None:
        raise _malformed(sender, what, problem)
    return count


def pickled(value: Any) -> bytes:
    """Returns the bytes from which `unpickled` makes the value."""
    return pickle.dumps(value)


def unpickled(data: bytes, sender: int, what: str) -> Any:
    """Returns the value that a member sent.

    Raises:
        HorovodInternalError: it cannot be read; names the sender.
    """
    try:
        return pickle.loads(data)
    except Exception as error:  # pickle raises any
        raise _malformed(sender, what, f"{type(error).__name__}: {error}") from error


def _malformed(sender: int, what: str, problem: str) -> HorovodInternalError:
    return HorovodInternalError(
        f"rank {sender} sent a malformed message where {what} was expected: {problem}. All ranks "
        "must run the same program with the same version of hvd_order"
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Copies the memory of a contiguous CPU tensor. PyTorch's own way needs numpy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def _finish(work: dist.Work | None) -> None:
    if work is not None:  # None: the backend has waited itself
        native.wait_for(work, _GROUPS_OWN_S)
