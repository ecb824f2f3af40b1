"""What is trained: a model, its batch, its optimizer, and a way back to the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.runner.workloads.recorder import Recorder

_SGD_RATE, _ADAMW_RATE = 1e-2, 1e-4


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """What emulated and small models are trained with."""
    return torch.optim.SGD(parameters, lr=_SGD_RATE, foreach=True)


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """As language models are trained."""
    return torch.optim.AdamW(parameters, lr=_ADAMW_RATE, foreach=True)


@dataclass
class Workload:
    """A model on one rank, and how it is trained.

    Attributes:
        model: maps a batch to a loss; the side-by-side benchmark needs a chain of children.
        max_norm: largest norm of all gradients together; None: they are not clipped.
        autocast: computes in bfloat16.
        scaled: a GradScaler scales the loss and unscales the gradients.
        masters: weights are of bfloat16, and float32 copies of them are updated.
        blocks: what FSDP2 shards by itself; empty: the children.
        reset: gives all parameters the values they began with.
    """

    model: torch.nn.Module
    batch: Callable[[], Any]
    optimizer: Callable[[list[Any]], torch.optim.Optimizer] = sgd
    max_norm: float | None = None
    autocast: bool = False
    scaled: bool = False
    masters: bool = False
    blocks: Sequence[torch.nn.Module] = ()
    recorder: Recorder = field(default_factory=Recorder)
    reset: Callable[[], None] = lambda: None

    def layer_bytes(self) -> list[int]:
        """Size of the parameters of each child; what several read counts for the first."""
        return self.by_layer({name: p.nbytes for name, p in self.model.named_parameters()})

    def by_layer(self, amounts: Mapping[str, int]) -> list[int]:
        """Sums of amounts by parameter name, for each child."""
        layers = {name: 0 for name, _ in self.model.named_children()}
        for name, amount in amounts.items():
            layers[name.split(".", 1)[0]] += amount
        return list(layers.values())
