"""8-bit codes and sums of them, with torch's operators: csrc/torch/cuda/codes.h a second time."""

from __future__ import annotations

import functools
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
    """Sums of several ranks' gradients, step after step; every rank owns a part of the elements.

    Ranks of a host add up their values. What of their sum goes to an owner elsewhere is encoded by
    one of them: the host's ranks take the owners elsewhere in turns.
    """

    def __init__(
        self, parts: Sequence[slice], elements: int, hosts: Sequence[int] | None = None
    ) -> None:
        """`parts` has the shard of each rank, `hosts` its host; None: each has its own."""
        self.parts = parts
        self.hosts = range(len(parts)) if hosts is None else hosts
        self.owed = torch.zeros(len(parts), elements)

    def _senders(self, owner: int) -> dict[int, list[int]]:
        """The ranks on whose messages an owner waits, and whose values each has."""
        senders = {}
        for host in set(self.hosts):
            members = [rank for rank, other in enumerate(self.hosts) if other == host]
            elsewhere = [rank for rank, other in enumerate(self.hosts) if other != host]
            turn = owner if owner in members else members[elsewhere.index(owner) % len(members)]
            senders[turn] = members
        return dict(sorted(senders.items()))

    def total(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """What every rank has after the sum."""
        result = torch.empty_like(gradients[0])
        for owner, part in enumerate(self.parts):
            of_hosts = []
            for rank, members in self._senders(owner).items():
                mine = functools.reduce(torch.add, [gradients[each][part] for each in members])
                if rank != owner:
                    sent = encoded(mine, self.owed[rank, part])
                    self.owed[rank, part], mine = sent.residual, sent.received
                of_hosts.append(mine)
            answer = encoded(functools.reduce(torch.add, of_hosts), self.owed[owner, part])
            self.owed[owner, part], result[part] = answer.residual, answer.received
        return result
