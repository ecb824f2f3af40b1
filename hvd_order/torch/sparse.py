"""Sparse gradients travel as indices and values, gathered from all ranks."""

from __future__ import annotations

import torch

from hvd_order.torch import collectives, reduce_ops

__all__: list[str] = []


def exchange(parameter: torch.Tensor, scale: float) -> bool:
    """Replaces a sparse ``parameter.grad`` (None counts as nothing) by the scaled sum over ranks.

    Collective: every rank takes part, with or without a gradient. The result is coalesced.

    Returns:
        Whether any rank had a gradient; if none had, ``.grad`` stays as it was.
    """
    gradient = parameter.grad
    if gradient is None:
        dims = _sparse_dims_everywhere(0)
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
        _sparse_dims_everywhere(gradient.sparse_dim())
    gradient = gradient.coalesce()
    # Rows of one gather belong to one rank, so indices are gathered with the entry first.
    indices = collectives.allgather(gradient.indices().t().contiguous())
    values = collectives.allgather(gradient.values() * scale)
    parameter.grad = torch.sparse_coo_tensor(
        indices.t(), values, parameter.shape, device=parameter.device
    ).coalesce()
    return True


def _sparse_dims_everywhere(mine: int) -> int:
    return int(collectives.allreduce(torch.tensor(mine), op=reduce_ops.Max).item())
