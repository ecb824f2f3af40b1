"""Lightning's Trainer with ``strategy="hvd_order"`` in place of ``ddp``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import helpers.environments.torchvision_operators  # noqa: F401
import pytest
from helpers.launching import launcher, launcher_environment
from helpers.ranks import REPOSITORY

pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import importlib, json, sys
import helpers.environments.torchvision_operators
lightning = importlib.import_module(
    "pytorch_lightning" if sys.argv[1] == "sharded" else "lightning.pytorch"
)
import torch
from torch import nn
import hvd_order.lightning
from helpers.training.small_problem import batches, loss_of, new_model

kind, strategy, devices, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
STEPS = 5
accumulation = [
    lightning.callbacks.GradientAccumulationScheduler({0: 2, 1: 4, 2: 1})
] if kind == "accumulated" else []


def chosen():
    if kind == "sharded" and strategy == "hvd_order":
        return hvd_order.lightning.HvdOrderStrategy(sharded=True)
    return strategy


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = new_model()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def training_step(self, batch, index):
        return loss_of(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("loss", loss_of(self.net(batch[0]), batch[1]), sync_dist=True)


class Overlap(lightning.Callback):
    def on_train_end(self, trainer, module):
        report = getattr(trainer.optimizers[0], "overlap_report", None)
        if report is not None:
            self.deferred = (report().deferred_parameters, report().parameters)


def trainer(epochs, overlap):
    return lightning.Trainer(
        accelerator="cpu", devices=devices, strategy=chosen(), max_epochs=epochs, logger=False,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[overlap, *accumulation],
        gradient_clip_val=0.05 if kind == "clipped" else None,
        precision="64-true" if kind != "mixed" else "bf16-mixed",
    )


def data(size, rank):
    return torch.utils.data.DataLoader(batches(STEPS, rank, size), batch_size=None)


class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return data(self.trainer.world_size, self.trainer.global_rank)

    val_dataloader = train_dataloader


overlap, module = Overlap(), Module()
first = trainer(2, overlap)
first.fit(module, Data())
checkpoint = folder + "/kept.ckpt"
first.save_checkpoint(checkpoint)
first.strategy.barrier()
module = Module()
second = trainer(3, Overlap())
second.fit(module, Data(), ckpt_path=checkpoint)
print("RESULT", json.dumps({
    "rank": second.global_rank, "ranks": second.world_size,
    "weights": [float(v) for p in module.net.parameters() for v in p.detach().flatten()],
    "deferred": getattr(overlap, "deferred", None), "loss": float(second.callback_metrics["loss"]),
}), flush=True)
"""


def results(output: str) -> list[dict[str, Any]]:
    lines = [line.partition("RESULT ")[2] for line in output.splitlines() if "RESULT " in line]
    return sorted((json.loads(line) for line in lines), key=lambda one: one["rank"])


def fitted(tmp_path: Path, kind: str, *command: str, strategy: str, devices: int) -> Any:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    folder = tmp_path / f"{strategy}_{devices}"
    folder.mkdir()
    done = subprocess.run(
        [*command, sys.executable, script, kind, strategy, str(devices), folder],
        env=launcher_environment({"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return results(done.stdout)


@pytest.mark.parametrize("kind", ["plain", "accumulated", "clipped", "mixed", "sharded"])
def test_a_fit_and_its_resumption_equal_one_process(tmp_path: Path, kind: str) -> None:
    (expected,) = fitted(tmp_path, kind, strategy="auto", devices=1)
    found = fitted(tmp_path, kind, *launcher("-np", "2"), strategy="hvd_order", devices=2)
    assert [one["ranks"] for one in found] == [2, 2]
    tolerance = 1e-3 if kind == "mixed" else 1e-11  # bfloat16 rounds each rank's part by itself
    for one in found:
        assert one["weights"] == pytest.approx(expected["weights"], abs=tolerance)
        assert one["loss"] == pytest.approx(expected["loss"], abs=tolerance)
    if kind in ("plain", "clipped"):
        assert found[0]["deferred"] == [4, 4]


def test_lightning_starts_the_processes_itself(tmp_path: Path) -> None:
    (expected,) = fitted(tmp_path, "plain", strategy="auto", devices=1)
    found = fitted(tmp_path, "plain", strategy="hvd_order", devices=2)
    assert [one["ranks"] for one in found] == [2, 2]
    assert found[0]["weights"] == pytest.approx(expected["weights"], abs=1e-11)


FABRIC = """
import json, sys
import helpers.environments.torchvision_operators
import lightning
import torch
import hvd_order.lightning
from helpers.training.small_problem import batches, loss_of, new_model

devices = int(sys.argv[1])
strategy = "auto" if devices == 1 else hvd_order.lightning.HvdOrderFabricStrategy(
    backward_passes_per_step=2)
fabric = lightning.Fabric(
    accelerator="cpu", devices=devices, strategy=strategy, precision="64-true")
fabric.launch()
torch.manual_seed(fabric.global_rank)
model = new_model()
if fabric.global_rank:
    torch.nn.init.zeros_(next(model.parameters()))
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.05))
for step, (rows, target) in enumerate(batches(12, fabric.global_rank, fabric.world_size)):
    with fabric.no_backward_sync(model, enabled=step % 2 == 0):
        fabric.backward(loss_of(model(rows), target) / 2)
    if step % 2:
        fabric.clip_gradients(model, optimizer, max_norm=0.05)
        optimizer.step()
        optimizer.zero_grad()
print("RESULT", json.dumps({
    "rank": fabric.global_rank,
    "weights": [float(v) for p in model.parameters() for v in p.flatten()],
}), flush=True)
"""


def test_fabric_equals_one_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FABRIC)
    found = []
    for devices, command in ((1, []), (2, launcher("-np", "2"))):
        done = subprocess.run(
            [*command, sys.executable, script, str(devices)],
            env=launcher_environment({"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}),
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        found += results(done.stdout)
    assert [one["rank"] for one in found] == [0, 0, 1]
    for one in found[1:]:
        assert one["weights"] == pytest.approx(found[0]["weights"], abs=1e-11)


def test_arguments_of_ddp_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c",
         "import helpers.environments.torchvision_operators; "
         "from hvd_order.lightning import HvdOrderStrategy; "
         "HvdOrderStrategy(find_unused_parameters=True)"],
        env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "takes no find_unused_parameters" in done.stderr
