"""8-bit codes and sums of them, with torch's operators: csrc/torch/cuda/codes.h a second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 256
SMALLEST = 2.0**-119


@dataclass
class Encoded:
    """Values as receivers decode them, and what they lack."""

    received: torch.Tensor
    residual: torch.Tensor


def encoded(values: torch.Tensor, residual: torch.Tensor | None = None) -> Encoded:
    """`values` plus `residual`, 1-d, in codes with one scale for each block of 256."""
    exact = values.float() if residual is None else values.float() + residual
    received = torch.cat([_block(block) for block in exact.split(BLOCK)])
    left = (exact - received).nan_to_num(0.0, 0.0, 0.0)
    return Encoded(received, left)


def _block(exact: torch.Tensor) -> torch.Tensor:
    finite = exact.isfinite()
    largest = exact[finite].abs().max() if finite.any() else torch.tensor(0.0)
    if largest < SMALLEST:
        return torch.where(finite, torch.zeros_like(exact), exact)
    step = largest / (127 if finite.all() else 126)
    rounded = (exact * (1 / step)).round() * step
    return torch.where(finite, rounded, exact)


class Ranks:
    """Sums of several ranks' gradients, step after step; every rank owns a part of the elements."""

    def __init__(self, parts: Sequence[slice], elements: int) -> None:
        """`parts` has the shard of each rank."""
        self.parts = parts
        self.owed = torch.zeros(len(parts), elements)

    def total(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """What every rank has after the sum."""
        result = torch.empty_like(gradients[0])
        for owner, part in enumerate(self.parts):
            sum_ = torch.zeros(1)
            for rank, gradient in enumerate(gradients):
                mine = gradient[part]
                if rank != owner:
                    sent = encoded(mine, self.owed[rank, part])
                    self.owed[rank, part], mine = sent.residual, sent.received
                sum_ = mine.clone() if rank == 0 else sum_ + mine
            answer = encoded(sum_, self.owed[owner, part])
            self.owed[owner, part], result[part] = answer.residual, answer.received
        return result
