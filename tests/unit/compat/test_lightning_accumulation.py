"""Gradient accumulation under the strategy for Lightning, with the part of it that is used."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool

SCHEDULE = {0: 4, 1: 8, 2: 1}
"""Batches that add up, by epoch: those of Lightning's GradientAccumulationScheduler."""


class DDPStrategy:
    """What Lightning's strategy does here."""

    def __init__(self) -> None:
        self._ddp_kwargs: dict[str, Any] = {}
        self._ddp_comm_hook = None
        self._model_averaging_period = None
        self.lightning_module: Any = None
        self.optimizers: list[torch.optim.Optimizer] = []

    def setup_optimizers(self, trainer: Any) -> None:
        self.optimizers = [torch.optim.SGD(self.lightning_module.parameters(), lr=0.1)]

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        pass


class Registry(dict[str, Any]):
    def register(self, name: str, strategy: type, description: str) -> None:
        self[name] = strategy


def body_schedule() -> list[tuple[int, list[int]]]:
    """By epoch, the passes that the optimizer adds up before a step."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lightning", "lightning.pytorch", "lightning.pytorch.strategies"):
            module = ModuleType(name)
            vars(module).update(DDPStrategy=DDPStrategy, StrategyRegistry=Registry())
            patch.setitem(sys.modules, name, module)
        sys.modules["lightning"].pytorch = sys.modules["lightning.pytorch"]  # type: ignore[attr-defined]
        patch.delitem(sys.modules, "hvd_order.lightning", raising=False)
        from hvd_order.lightning import HvdOrderStrategy

        sys.modules.pop("hvd_order.lightning")
        strategy = HvdOrderStrategy()
        trainer = SimpleNamespace(accumulate_grad_batches=SCHEDULE[0])
        model: Any = torch.nn.Linear(2, 1)
        model.automatic_optimization, model.trainer = True, trainer
        strategy.lightning_module = model
        strategy.setup_optimizers(trainer)
        (optimizer,) = strategy.optimizers
        found = []
        for epoch, batches in SCHEDULE.items():
            trainer.accumulate_grad_batches = batches
            passes = []
            for _ in range(batches):
                loss = model(torch.ones(1, 2)).sum()
                strategy.pre_backward(loss)
                passes.append(optimizer.backward_passes_per_step)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((epoch, passes))
        return found


def test_a_schedule_is_followed_up_and_down(two_ranks: RankPool) -> None:
    for found in two_ranks.run(body_schedule):
        assert found == [(epoch, batches * [batches]) for epoch, batches in SCHEDULE.items()]
