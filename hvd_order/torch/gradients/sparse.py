"""Exchanges sparse gradients as indices and values, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.process_sets import ProcessSet, global_process_set
from hvd_order.engine.requests import reduce_ops
from hvd_order.torch.collectives import single
from hvd_order.torch.updates.partial_step import InnerStep

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts the sum or average of sparse COO tensors, by gathering their entries.

    Args:
        tensor: sparse, the same shape, dtype and sparse dimensions on every rank.
        name: shown in errors; must not be in flight already.
        op: Average or Sum.
        process_set: the ranks that take part; only they may call.

    Returns:
        A function that waits and returns the result. The result is not coalesced (as in Horovod):
        an index that several ranks have occurs several times.

    Raises:
        InvalidUsage: the tensor is dense, or ``op`` is neither Average nor Sum.
    """
    chosen = reduce_ops.choose_op(op, None)
    if not tensor.is_sparse:
        raise InvalidUsage("expected a sparse COO tensor; use allreduce_async for dense ones")
    if chosen not in (reduce_ops.Average, reduce_ops.Sum):
        raise InvalidUsage(f"op is hvd.{chosen.name}; sparse tensors take hvd.Average or hvd.Sum")
    coo = tensor.detach()
    indices = single.allgather_async(
        coo._indices().t().contiguous(), f"{name}.indices", process_set
    )
    values = single.allgather_async(coo._values(), f"{name}.values", process_set)

    def wait() -> torch.Tensor:
        all_values = single.synchronize(values)
        all_indices = single.synchronize(indices)
        if chosen is reduce_ops.Average:
            all_values = all_values / len(process_set.ranks)
        return torch.sparse_coo_tensor(
            all_indices.t(), all_values.to(tensor.dtype), tensor.shape, device=tensor.device
        )

    return wait


def exchange(parameter: torch.Tensor, scale: float, process_set: ProcessSet, name: str) -> bool:
    """Replaces a sparse ``parameter.grad`` (None counts as empty) by the scaled sum over ranks.

    Collective: every rank takes part, with or without a gradient. The result is coalesced.

    Args:
        parameter: the same on all ranks.
        scale: factor of the gradient.
        process_set: the ranks that take part.
        name: of the parameter among those of all optimizers; threads exchange theirs at once.

    Returns:
        Whether any rank had a gradient; if none had, ``.grad`` stays as it was.
    """
    gradient = parameter.grad
    if gradient is None:
        dims = _sparse_dims_everywhere(0, process_set, name)
        if dims == 0:
            return False
        gradient = torch.sparse_coo_tensor(
            torch.empty((dims, 0), dtype=torch.long),
            torch.empty((0, *parameter.shape[dims:]), dtype=parameter.dtype),
            parameter.shape,
            device=parameter.device,
        )
    else:
        if not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        _sparse_dims_everywhere(gradient.sparse_dim(), process_set, name)
    gradient = gradient.coalesce()
    # A gather joins along the first dimension, so indices are transposed: one row for each entry.
    indices = single.allgather(gradient.indices().t().contiguous(), f"{name}.indices", process_set)
    values = single.allgather(gradient.values() * scale, f"{name}.values", process_set)
    parameter.grad = torch.sparse_coo_tensor(
        indices.t(), values, parameter.shape, device=parameter.device
    ).coalesce()
    return True


def _sparse_dims_everywhere(mine: int, process_set: ProcessSet, name: str) -> int:
    most = single.allreduce(
        torch.tensor(mine), name=f"{name}.dims", op=reduce_ops.Max, process_set=process_set
    )
    return int(most.item())


def with_sparse_gradients(step: InnerStep) -> InnerStep:
    """A step in which dense-exchanged gradients of embedding tables become sparse again.

    For ``SparseAdam`` with ``sparse_as_dense``, which accepts only sparse gradients. Rows of zeros
    are left out, as in Horovod: a dense sum does not show which rows were looked up.
    """

    def sparse_step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        dense: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and not gradient.is_sparse:
                    dense.append((parameter, gradient))
                    parameter.grad = gradient.to_sparse(1)
        try:
            step(optimizer)
        finally:
            for parameter, gradient in dense:
                parameter.grad = gradient
        return loss

    return sparse_step
