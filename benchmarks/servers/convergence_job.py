"""One worker of the convergence benchmark: trains the demo's GPT; worker 0 writes the result."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import hvd_order.torch as hvd
from hvd_order.tools.demo.corpus import VOCABULARY, Batches, Corpus, load_corpus
from hvd_order.tools.demo.gpt import Gpt, GptConfig, next_token_loss
from hvd_order.tools.demo.systems import Recipe

_HELD_OUT_BATCHES = 16
_HELD_OUT_SEQUENCES = 16  # in each of them, all ranks together


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    result = train(job)
    if hvd.rank() == 0:
        Path(job["result"]).write_text(json.dumps(result))
    hvd.shutdown()


def train(job: dict[str, Any]) -> dict[str, Any]:
    """All steps, then the loss of worker 0's weights on text that was never trained on."""
    rank, size = hvd.rank(), hvd.size()
    corpus = load_corpus()
    recipe = Recipe(
        GptConfig(vocabulary=VOCABULARY), seed=job["seed"], steps=job["steps"],
        learning_rate=job["learning_rate"],
    )  # fmt: skip
    model = recipe.make_model()
    optimizer, schedule = make_optimizer(recipe, model, job["optimizer"])
    batches = Batches(
        corpus.train, context=GptConfig.context, batch=job["sequences"] * size, seed=job["seed"]
    )
    losses = torch.zeros(job["steps"])
    begin = time.monotonic()
    for step in range(job["steps"]):
        inputs, targets = batches.take(step, rank=rank, size=size)
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    optimizer.flush()  # type: ignore[attr-defined]  # typed as what it was before
    seconds = time.monotonic() - begin
    hvd.barrier()  # in asynchronous training others may be behind
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return {
        "held_out": held_out_loss(model, corpus, rank, size),
        "train": (hvd.allreduce(losses, op=hvd.Average)).tolist(),
        "seconds": seconds,
    }


def make_optimizer(recipe: Recipe, model: Gpt, name: str) -> tuple[Optimizer, LambdaLR]:
    """The optimizer that the job names, with the demo's warm-up and cosine."""
    inner: Optimizer
    if name == "sgd":
        inner = SGD(model.parameters(), lr=recipe.learning_rate, momentum=0.9)
    else:
        inner = recipe.make_optimizer(model)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    schedule = recipe.make_schedule(optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return optimizer, schedule


def held_out_loss(model: Gpt, corpus: Corpus, rank: int, size: int) -> float:
    """Mean over held-out batches, in nats a token; each rank does a share of each."""
    batches = Batches(
        corpus.validation, context=GptConfig.context, batch=_HELD_OUT_SEQUENCES, seed=0
    )
    total: Tensor = torch.zeros((), dtype=torch.float64)
    model.eval()
    with torch.inference_mode():
        for number in range(_HELD_OUT_BATCHES):
            inputs, targets = batches.take(number, rank=rank, size=size)
            total += next_token_loss(model(inputs), targets).double()
    model.train()
    return float(hvd.allreduce(total, op=hvd.Average)) / _HELD_OUT_BATCHES


if __name__ == "__main__":
    main()
