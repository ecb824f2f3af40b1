"""Common parts of the collectives: checks, buffers and descriptions of tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.job import group_collectives
from hvd_order.engine.requests.collective_queue import CollectiveQueue

__all__: list[str] = []


def request_name(queue: CollectiveQueue, kind: str, name: str | None) -> str:
    """Returns the name of a request on all ranks; ``name`` is the user's."""
    return queue.next_name(kind) if name is None else f"{kind}.{name}"


def check_tensor(tensor: object) -> None:
    """Raises InvalidUsage unless the argument is a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidUsage(f"expected a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise InvalidUsage(f"{tensor.layout} tensors are not supported; use tensor.to_dense()")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without gradient history and subclass; same memory."""
    detached = tensor.detach()
    return detached if type(detached) is torch.Tensor else detached.as_subclass(torch.Tensor)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy without gradient history and subclass.

    Raises:
        InvalidUsage: the argument is no dense tensor.
    """
    check_tensor(tensor)
    return plain(tensor).clone(memory_format=torch.contiguous_format)


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Same as `own_copy`, with one row if the tensor has no dimensions."""
    rows = own_copy(tensor)
    return rows.reshape(1) if rows.dim() == 0 else rows


def writable_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's own memory if it can be sent from directly, else a copy.

    Subclasses (parameters among them) are written in `deliver`, through ``copy_`` on the caller's
    thread, so that code that intercepts the write observes it.

    Raises:
        InvalidUsage: the argument is no dense tensor.
    """
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_contiguous():
        return tensor.detach()
    return own_copy(tensor)


def deliver(buffer: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """Returns the result in ``buffer``, copied into ``target`` if there is one."""
    if target is None:
        return buffer
    if type(target) is not torch.Tensor or target.data_ptr() != buffer.data_ptr():
        with torch.no_grad():
            target.copy_(buffer)
    return target


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the flat memory of a contiguous tensor, so that any dtype can be sent."""
    flat = tensor.reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8).reshape(-1)


def gather_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers the rows of all ranks; pads to the longest, since backends require equal sizes."""
    counts = group_collectives.all_gather(torch.tensor([rows.shape[0]]), group)
    row_counts = [int(one) for one in counts]
    row_bytes = rows.shape[1:].numel() * rows.element_size()
    result = rows.new_empty((sum(row_counts), *rows.shape[1:]))
    if result.numel() == 0:
        return result
    padded = torch.empty(max(row_counts) * row_bytes, dtype=torch.uint8, device=rows.device)
    if rows.numel():
        padded[: rows.shape[0] * row_bytes] = as_bytes(rows)
    gathered = group_collectives.all_gather(padded, group)
    parts = [one[: n * row_bytes] for one, n in zip(gathered, row_counts, strict=True)]
    torch.cat(parts, out=as_bytes(result))
    return result


def dtype_name(tensor: torch.Tensor) -> str:
    """Returns text such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def describe(tensor: torch.Tensor) -> str:
    """Returns text such as "float32 [2, 3] on cpu"."""
    return f"{dtype_name(tensor)} {list(tensor.shape)} on {tensor.device.type}"


def describe_rows(rows: torch.Tensor) -> str:
    """Returns text such as "float32 rows of shape [3] on cpu", for any number of rows."""
    return f"{dtype_name(rows)} rows of shape {list(rows.shape[1:])} on {rows.device.type}"
