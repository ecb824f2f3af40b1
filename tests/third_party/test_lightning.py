"""Lightning's trainer, one device a process, with an optimizer that averages gradients itself."""

from __future__ import annotations

from typing import Any

import helpers.environments.torchvision_operators  # noqa: F401
import pytest
import torch
from helpers.ranks import RankFactory, run_script
from helpers.training.small_problem import (
    Weights,
    alone,
    batches,
    equal,
    loss_of,
    new_model,
    weights_of,
)
from torch import nn

import hvd_order.torch as hvd

lightning = pytest.importorskip("lightning.pytorch")

STEPS = 6
CLIP = 0.05  # below the norms that there are


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


class Automatic(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = new_model()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = hvd.DistributedOptimizer(
            adam(list(self.net.parameters())), self.net.named_parameters()
        )
        return self.optimizer

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        rows, target = batch
        return loss_of(self.net(rows), target)


class Manual(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        optimizer.step()


def fitted(kind: str) -> Automatic:
    module = Manual() if kind == "manual" else Automatic()
    mine = batches(STEPS, hvd.rank(), hvd.size())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "test")  # as under hvd-order run
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            gradient_clip_val=CLIP if kind == "clipped" else None,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(mine, batch_size=None))
    return module


def body_fit(kind: str) -> tuple[Weights, tuple[int, int]]:
    module = fitted(kind)
    optimizer: Any = module.optimizer
    report = optimizer.overlap_report()
    return weights_of(module.net), (report.deferred_parameters, report.parameters)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["automatic", "manual", "clipped"])
def test_a_fit_equals_one_process(ranks: RankFactory, kind: str) -> None:
    def clip(model: nn.Module) -> None:
        if kind == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)

    expected = alone(adam, STEPS, clip)
    for weights, deferred in ranks(2).run(body_fit, kind, timeout=240):
        assert equal(weights, expected)
        assert deferred == (4, 4) or kind == "clipped"


DDP = """
import helpers.environments.torchvision_operators
import lightning.pytorch as lightning
import torch
import hvd_order.torch as hvd
from helpers.training.small_problem import batches, loss_of, new_model
from hvd_order.base.errors import InvalidUsage


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = new_model()

    def configure_optimizers(self):
        return hvd.DistributedOptimizer(torch.optim.SGD(self.net.parameters(), lr=0.1))

    def training_step(self, batch, index):
        return loss_of(self.net(batch[0]), batch[1])


hvd.init()
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
try:
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(2), batch_size=None))
except InvalidUsage as error:
    print(error)
"""


@pytest.mark.timeout(300)
def test_what_its_strategy_wraps_is_refused() -> None:
    for rank, end in enumerate(run_script(2, DDP, env={"TORCHELASTIC_RUN_ID": "1"}, timeout=240)):
        assert end.returncode == 0, end.stderr
        assert f"rank {rank}: parameter '" in end.stdout
        assert 'Use Trainer(devices=1, strategy="auto")' in end.stdout
