"""The account of steps in the TensorBoard files of other libraries' trainers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers.environments.torchvision_operators  # noqa: F401
import pytest
import torch
from helpers.step_reports import stats_of
from helpers.training.small_problem import batches, loss_of, new_model

import hvd_order.torch as hvd
from hvd_order.base.account.step_stats import StepStats

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")

EXPECTED = {f"hvd_order/{name}": value for name, value in stats_of(0).as_dict().items()}


class Measured(torch.optim.SGD):
    """Has the account that a distributed optimizer would have on a real network."""

    def stats(self) -> StepStats:
        return stats_of(0)


def logged(folder: Path) -> dict[str, float]:
    """The scalars of all event files, by tag."""
    files = list(folder.rglob("events.out.tfevents.*"))
    assert files
    return {
        value.tag: value.simple_value
        for file in files
        for data in _records(file.read_bytes())
        for value in event_pb2.Event.FromString(data).summary.value
    }


def _records(data: bytes) -> Iterator[bytes]:
    while data:  # length, its checksum, content, its checksum
        (length,) = struct.unpack("<Q", data[:8])
        yield data[12 : 12 + length]
        data = data[16 + length :]


def shown(tags: dict[str, float], prefix: str = "") -> dict[str, float]:
    begin = f"{prefix}hvd_order/"
    return {k.removeprefix(prefix): v for k, v in tags.items() if k.startswith(begin)}


@pytest.fixture(autouse=True)
def _initialised() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import TensorBoardLogger

    import hvd_order.lightning

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = new_model()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Measured(self.net.parameters(), lr=0.1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return loss_of(self.net(batch[0]), batch[1])

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=2,
        logger=TensorBoardLogger(tmp_path), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[hvd_order.lightning.StepStatsCallback()],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(2), batch_size=None))
    assert shown(logged(tmp_path)) == pytest.approx(EXPECTED)
    assert trainer.callback_metrics["hvd_order/step_s"] == 0.5


def test_transformers_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from hvd_order.watch.callbacks.transformers import log_step_stats

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=2, report_to="tensorboard", use_cpu=True,
        save_strategy="no", disable_tqdm=True, per_device_train_batch_size=4,
    )  # fmt: skip
    tokens = torch.randint(32, (8, 8))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    optimizer = Measured(model.parameters(), lr=0.1)
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    log_step_stats(trainer)
    trainer.train()
    # Its reporter writes everything but evaluations under this tag.
    assert shown(logged(tmp_path), "train/") == pytest.approx(EXPECTED)
    assert trainer.state.log_history[0]["hvd_order/step_s"] == 0.5


def test_ignite(tmp_path: Path) -> None:
    pytest.importorskip("ignite")
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers import TensorboardLogger

    from hvd_order.watch.callbacks.ignite import log_step_stats

    model = new_model()
    first, second = (Measured(model.parameters(), lr=0.1) for _ in range(2))
    trainer = create_supervised_trainer(model, first, loss_of)
    log_step_stats(trainer, first, second, every=2)
    with TensorboardLogger(log_dir=str(tmp_path)) as logger:
        logger.attach_output_handler(
            trainer, Events.ITERATION_COMPLETED(every=2), tag="training", metric_names="all"
        )
        trainer.run(batches(2))
    of_second = {k.replace("hvd_order/", "hvd_order/1/"): v for k, v in EXPECTED.items()}
    assert shown(logged(tmp_path), "training/") == pytest.approx(EXPECTED | of_second)
