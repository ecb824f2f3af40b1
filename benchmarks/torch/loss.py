"""What do fewer bits do to the loss? See README.md."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hvd_order.torch as hvd
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.ranks import run_as_rank, run_ranks

RANKS = 2
CONTEXT, WIDTH, LAYERS, ROWS = 64, 64, 2, 16
SYSTEMS = ("none", "int8", "int8 without feedback", "bf16_ef", "bf16")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
}


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


def text() -> Tensor:
    """The standard library's top modules, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8
    ).long()


def batch(data: Tensor, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - CONTEXT - 1, (rows,), generator=generator).tolist()
    both = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
    return both[:, :-1], both[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def trained(system: str, optimizer_name: str, seed: int, steps: int) -> float:
    """The loss on text that was not trained on."""
    data = text()
    cut = len(data) * 9 // 10
    torch.manual_seed(seed)
    model = Model()
    name, _, without = system.partition(" ")
    optimizer: Any = hvd.DistributedOptimizer(
        OPTIMIZERS[optimizer_name](model.parameters()), model.named_parameters(),
        compression=getattr(hvd.Compression, name),
    )  # fmt: skip
    mine = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(data[:cut], ROWS, mine)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if without:
            optimizer.flush()
            for entry in optimizer._hvd_exchange._table.entries:
                if entry.residual is not None:
                    entry.residual.zero_()
    optimizer.flush()
    with torch.no_grad():
        unseen = batch(data[cut:], 512, torch.Generator().manual_seed(0))
        return loss_of(model, *unseen).item()


def in_rank(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for optimizer in options.optimizers:
        for seed in range(options.seeds):
            for system in SYSTEMS:
                loss = trained(system, optimizer, seed, options.steps)
                found.append({"optimizer": optimizer, "seed": seed, "system": system, "loss": loss})
                if hvd.rank() == 0:
                    print(f"{optimizer}, seed {seed}, {system}: {loss:.4f}", file=sys.stderr)
    return found


def measure(options: argparse.Namespace) -> Answer:
    runs = run_ranks(RANKS, sys.argv[1:], {"HVD_ORDER_TUNE": "0"})
    summary: dict[str, Any] = {}
    for optimizer in options.optimizers:
        print(f"{optimizer}: loss after {options.steps} steps, median and spread of the seeds")
        for system in SYSTEMS:
            losses = [
                r["loss"] for r in runs if (r["optimizer"], r["system"]) == (optimizer, system)
            ]
            summary[f"{optimizer} {system}"] = {
                "median": statistics.median(losses), "least": min(losses), "most": max(losses)
            }  # fmt: skip
            middle = statistics.median(losses)
            print(f"  {system:<24} {middle:.4f}  [{min(losses):.4f}, {max(losses):.4f}]")
    return Answer({"runs": runs}, summary, {"ranks": RANKS})


if __name__ == "__main__":
    sys.exit(ask(
        "loss", __doc__, measure,
        option("--steps", 1000, "of each run"),
        option("--seeds", 5),
        option("--optimizers", list(OPTIMIZERS), "which", choices=list(OPTIMIZERS)),
        quick={"steps": 5, "seeds": 1},
        rank=lambda options: run_as_rank(
            lambda _: in_rank(options), options.worker, "cpu"
        ),
    ))  # fmt: skip
