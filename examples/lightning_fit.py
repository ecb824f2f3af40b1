"""Trains a LightningModule by Lightning's Trainer, with our strategy in place of ``ddp``.

hvd-order run -np 2 python examples/lightning_fit.py
"""

import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvd_order.lightning  # noqa: F401  (adds the strategy "hvd_order")


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch, index):
        rows, labels = batch
        output = self.net(rows).squeeze(1)
        self.log("accuracy", ((output > 0) == (labels > 0)).float().mean(), sync_dist=True)
        return torch.nn.functional.binary_cross_entropy_with_logits(output, labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


rows = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
data = TensorDataset(rows, (rows[:, :8].sum(1) > rows[:, 8:].sum(1)).float())
trainer = lightning.Trainer(
    strategy="hvd_order",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),  # ranks of this host
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
    accelerator="gpu" if torch.cuda.is_available() else "cpu",
    max_epochs=5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Model(), DataLoader(data, batch_size=32, shuffle=True))  # each rank gets its share
if trainer.is_global_zero:
    accuracy = trainer.callback_metrics["accuracy"]
    print(f"{trainer.world_size} ranks, accuracy {accuracy:.3f}", flush=True)
