"""Clipping by the norm of all gradients; while sums are unpacked, their squares are added up."""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import reduce

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.sums.norms import in_type

__all__ = ["clip_grad_norm_"]


def coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor by which ``torch.nn.utils.clip_grads_with_norm_`` scales."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def clip_grad_norm_(
    entries: Iterable[ParameterEntry], untouched: Set[ParameterEntry], max_norm: float
) -> torch.Tensor:
    """Scales finished gradients so that the 2-norm of all of them is at most ``max_norm``.

    Args:
        untouched: entries whose gradients nobody can have changed since their sums were unpacked.

    Returns:
        The norm before, one element, as ``torch.nn.utils.clip_grad_norm_`` returns it. No wait for
        a device.
    """
    gradients = {
        entry: entry.parameter.grad for entry in entries if entry.parameter.grad is not None
    }
    known = {
        entry: entry.squares
        for entry in gradients
        if entry in untouched and entry.squares is not None
    }
    norm = get_total_norm([g for entry, g in gradients.items() if entry not in known])
    if known:
        device = norm.device if len(known) < len(gradients) else next(iter(known.values())).device
        squares = torch.cat([each.to(device) for each in known.values()]).sum()
        dtype = reduce(torch.promote_types, {gradient.dtype for gradient in gradients.values()})
        norm = in_type((squares + norm.to(device).double().square()).sqrt(), dtype)
    clip_grads_with_norm_([entry.parameter for entry in gradients], max_norm, norm)
    return norm
