"""Accelerate and transformers.Trainer, which wrap models in DDP by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.ranks import Completed, run_script
from helpers.training.small_problem import alone, equal

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

STEPS = 6

ACCELERATE = f"""
import sys
import torch
import hvd_order.torch as hvd
import helpers.environments.torchvision_operators
from accelerate import Accelerator
from hvd_order.base.errors import InvalidUsage
from helpers.training.small_problem import batches, loss_of, new_model, weights_of

if sys.argv[1] == "hvd first":
    hvd.init()
accelerator = Accelerator(cpu=True)
hvd.init()
assert accelerator.num_processes == hvd.size() == 2


def train(model, net, optimizer):
    for rows, target in batches({STEPS}, hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model(rows), target))
        optimizer.step()


def distributed(net):
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return accelerator.prepare(hvd.DistributedOptimizer(sgd, net.named_parameters()))


net = new_model()
try:
    train(accelerator.prepare(net), net, distributed(net))
except InvalidUsage as error:
    print(error)

net = new_model()
train(accelerator.prepare_model(net, evaluation_mode=True), net, distributed(net))
torch.save(weights_of(net), sys.argv[2] + str(hvd.rank()))
"""


def check(ends: list[Completed], words: str) -> None:
    for rank, end in enumerate(ends):
        assert end.returncode == 0, end.stderr
        assert f"rank {rank}: parameter '" in end.stdout
        assert "is in a DistributedDataParallel module, which averages its gra" in end.stdout
        assert words in end.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", ["hvd first", "accelerate first"])
def test_what_prepare_wraps_is_refused_and_its_cure_works(order: str, tmp_path: Path) -> None:
    ends = run_script(2, ACCELERATE, order, str(tmp_path / "rank"), timeout=240)
    check(ends, "accelerator.prepare_model(model, evaluation_mode=True)")
    expected = alone(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), STEPS)
    for rank in range(2):
        assert equal(torch.load(tmp_path / f"rank{rank}"), expected)


TRAINER = """
import sys
import torch
import hvd_order.torch as hvd
import helpers.environments.torchvision_operators
from hvd_order.base.errors import InvalidUsage
from helpers.training.small_problem import BATCH, weights_of
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

size, folder = int(sys.argv[1]), sys.argv[2]
hvd.init()
torch.manual_seed(0)
TOKENS = torch.randint(32, (24, 8))


def new_trainer():
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )
    model = GPT2LMHeadModel(config).double()
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=5, per_device_train_batch_size=BATCH // size,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, seed=3,
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model.named_parameters()
    )
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    return Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))


if size > 1:
    try:
        new_trainer().train()
    except InvalidUsage as error:
        print(error)
trainer = new_trainer()
trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
trainer.train()
torch.save(weights_of(trainer.model), f"{folder}/{size}.{hvd.rank()}")
"""


@pytest.mark.timeout(300)
def test_what_trainer_wraps_is_refused_and_its_cure_works(tmp_path: Path) -> None:
    (one,) = run_script(1, TRAINER, "1", str(tmp_path), timeout=120)
    assert one.returncode == 0, one.stderr
    ends = run_script(2, TRAINER, "2", str(tmp_path), timeout=170)
    check(ends, "transformers.Trainer has wrapped it")
    check(ends, "trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)")
    expected = torch.load(tmp_path / "1.0")
    for rank in range(2):
        assert equal(torch.load(tmp_path / f"2.{rank}"), expected)
