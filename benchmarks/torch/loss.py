"""What do fewer bits do to the loss? See README.md."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import hvd_order.torch as hvd
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.ranks import run_as_rank, run_ranks

RANKS = 2
CONTEXT, WIDTH, LAYERS, ROWS = 64, 64, 2, 16
SYSTEMS = ("none", "int8", "int8 without feedback", "bf16_ef", "bf16")


class Lion(torch.optim.Optimizer):
    """Updates by signs, so that a small error of a gradient may turn a whole step.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                parameter.add_(mean.lerp(parameter.grad, 0.1).sign_(), alpha=-group["lr"])
                mean.lerp_(parameter.grad, 0.01)


OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=150 * rate, momentum=0.9),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
    "lion": lambda parameters, rate: Lion(parameters, lr=rate / 5),
}


class Task(Protocol):
    """Something to learn.

    Attributes:
        rate: AdamW's learning rate; the others' follow from it.
    """

    rate: float

    def model(self) -> nn.Module:
        """A new model."""

    def batch(self, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Inputs and labels for training; None: what is not trained on."""


class Model(nn.Module):
    """A language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits by row, place and byte."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        out: Tensor = self.head(self.norm(self.layers(hidden, mask=mask, is_causal=True)))
        return out


class Text:
    """The standard library's top modules, as bytes."""

    rate = 2e-3
    model = Model

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self._data = torch.frombuffer(
            bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8
        ).long()
        self._cut = len(self._data) * 9 // 10

    def batch(self, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """See `Task`."""
        data, rows = self._data[: self._cut], ROWS
        if generator is None:
            data, rows, generator = self._data[self._cut :], 512, torch.Generator().manual_seed(0)
        starts = torch.randint(len(data) - CONTEXT - 1, (rows,), generator=generator).tolist()
        both = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        return both[:, :-1], both[:, 1:]


class Digits:
    """Images of handwritten digits, which scikit-learn brings along."""

    rate = 1e-3

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            sys.exit("the digits need scikit-learn: pip install scikit-learn")
        found = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
        self._images = torch.tensor(found.images, dtype=torch.float32)[order].unsqueeze(1) / 16
        self._labels = torch.tensor(found.target)[order].long()
        self._cut = len(order) * 4 // 5

    def model(self) -> nn.Module:
        """See `Task`."""
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def batch(self, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """See `Task`."""
        if generator is None:
            return self._images[self._cut :], self._labels[self._cut :]
        chosen = torch.randint(self._cut, (ROWS,), generator=generator)
        return self._images[chosen], self._labels[chosen]


TASKS: dict[str, type[Task]] = {"text": Text, "digits": Digits}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def trained(task: Task, system: str, optimizer_name: str, seed: int, steps: int) -> float:
    """The loss on what was not trained on."""
    torch.manual_seed(seed)
    model = task.model()
    name, _, without = system.partition(" ")
    optimizer: Any = hvd.DistributedOptimizer(
        OPTIMIZERS[optimizer_name](model.parameters(), task.rate), model.named_parameters(),
        compression=getattr(hvd.Compression, name),
    )  # fmt: skip
    mine = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, *task.batch(mine)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if without:
            optimizer.flush()
            for entry in optimizer._hvd_exchange._table.entries:
                if entry.residual is not None:
                    entry.residual.zero_()
    optimizer.flush()
    model.eval()
    with torch.no_grad():
        return loss_of(model, *task.batch(None)).item()


def in_rank(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for name, optimizer in itertools.product(options.tasks, options.optimizers):
        task = TASKS[name]()
        for seed, system in itertools.product(range(options.seeds), SYSTEMS):
            loss = trained(task, system, optimizer, seed, options.steps)
            found.append({
                "task": name, "optimizer": optimizer, "seed": seed, "system": system, "loss": loss,
            })  # fmt: skip
            if hvd.rank() == 0:
                print(f"{name}, {optimizer}, seed {seed}, {system}: {loss:.4f}", file=sys.stderr)
    return found


def measure(options: argparse.Namespace) -> Answer:
    runs = run_ranks(RANKS, sys.argv[1:], {"HVD_ORDER_TUNE": "0"})
    summary: dict[str, Any] = {}
    for task, optimizer in itertools.product(options.tasks, options.optimizers):
        print(
            f"{task}, {optimizer}: loss after {options.steps} steps, median and spread of the seeds"
        )
        for system in SYSTEMS:
            which = (task, optimizer, system)
            losses = [r["loss"] for r in runs if (r["task"], r["optimizer"], r["system"]) == which]
            middle = statistics.median(losses)
            summary[" ".join(which)] = {"median": middle, "least": min(losses), "most": max(losses)}
            print(f"  {system:<24} {middle:.4f}  [{min(losses):.4f}, {max(losses):.4f}]")
    return Answer({"runs": runs}, summary, {"ranks": RANKS})


if __name__ == "__main__":
    sys.exit(ask(
        "loss", __doc__, measure,
        option("--steps", 1000, "of each run"),
        option("--seeds", 5),
        option("--tasks", ["text"], "what is learnt", choices=list(TASKS)),
        option("--optimizers", list(OPTIMIZERS), "which", choices=list(OPTIMIZERS)),
        quick={"steps": 5, "seeds": 1},
        rank=lambda options: run_as_rank(
            lambda _: in_rank(options), options.worker, "cpu"
        ),
    ))  # fmt: skip
