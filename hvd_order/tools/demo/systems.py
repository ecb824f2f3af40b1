"""The two ways to train that the demo compares, behind one small interface."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import hvd_order.torch as hvd
from hvd_order.tools.demo.gpt import Gpt, GptConfig, next_token_loss


@dataclass(frozen=True)
class Recipe:
    """Settings that both systems share, so that only communication differs.

    Attributes:
        model: shape of the model.
        seed: draws the initial weights.
        steps: length of the learning-rate schedule, in steps.
        learning_rate: AdamW's, at its highest.
    """

    model: GptConfig
    seed: int
    steps: int
    learning_rate: float = 1e-3

    def make_model(self) -> Gpt:
        """The same weights on every rank and for every system."""
        torch.manual_seed(self.seed)
        return Gpt(self.model)

    def make_optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """AdamW with torch's fused kernel."""
        return torch.optim.AdamW(
            model.parameters(),
            lr=self.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """A short warm-up, then half a cosine down to a tenth."""
        warm_up = max(1, min(20, self.steps // 5))

        def share(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            progress = (step - warm_up) / max(1, self.steps - warm_up)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

        return LambdaLR(optimizer, share)


class System(Protocol):
    """One way to train the model on all ranks."""

    @property
    def name(self) -> str:
        """What the tables call it."""

    @property
    def model(self) -> nn.Module:
        """The trained model, without a wrapper; read it after ``finish``."""

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """One training step; returns this rank's loss in nats a token."""

    def finish(self) -> None:
        """Returns when every update asked for so far has been applied on this rank."""


class PlainDdp:
    """torch's DistributedDataParallel: buckets in order of arrival, all done before the update."""

    name = "plain DDP"

    def __init__(self, recipe: Recipe) -> None:
        self.model = recipe.make_model()
        self._replica = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._optimizer = recipe.make_optimizer(self.model)
        self._schedule = recipe.make_schedule(self._optimizer)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """See ``System``."""
        loss = next_token_loss(self._replica(inputs), targets)
        loss.backward()
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return loss.item()

    def finish(self) -> None:
        """Does nothing: there are no deferred updates."""


class HvdOrder:
    """hvd_order: slices in order of need, each update just before its weights are read."""

    name = "hvd_order"

    def __init__(self, recipe: Recipe) -> None:
        self.model = recipe.make_model()
        self._optimizer = hvd.DistributedOptimizer(
            recipe.make_optimizer(self.model), named_parameters=self.model.named_parameters()
        )
        self._schedule = recipe.make_schedule(self._optimizer)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self._optimizer, root_rank=0)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """See ``System``."""
        with hvd.timeline_span("forward"):
            loss = next_token_loss(self.model(inputs), targets)
        with hvd.timeline_span("backward"):
            loss.backward()
        with hvd.timeline_span("step"):
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
        return loss.item()

    def finish(self) -> None:
        """Waits for the slices that still travel and applies their updates."""
        self._optimizer.flush()  # type: ignore[attr-defined]  # typed as what it was before
