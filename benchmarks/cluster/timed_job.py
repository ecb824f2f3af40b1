"""An elastic training whose steps take a known time: the forward pass waits instead of computing.

Gradients, their exchange, the optimizer and the commits are real, but small. A rank waits for its
share of the batch, so more ranks are faster, and many jobs fit on few processors.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

import hvd_order.torch as hvd


class Waiting(torch.nn.Module):
    """A small model behind a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.wait_s = 0.0
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.wait_s)
        return self.layers(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=int)
    parser.add_argument("--batch", type=int, required=True, help="samples of a step of all ranks")
    parser.add_argument("--sample-s", type=float, required=True, help="wait of one rank a sample")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Waiting()
    model.wait_s = options.batch / hvd.size() * options.sample_s
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    progress = Path(os.environ["HVD_ORDER_ELASTIC_DIR"], "progress")

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        say(f"begins with {hvd.size()} at {state.step} {time.time()!r}")
        while state.step < options.steps:
            x = torch.randn(4, 32)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.synchronize()
            state.step += 1
            say(f"step {state.step} of {hvd.size()} {time.time()!r}")
            if hvd.rank() == 0:
                draft = progress.with_suffix(".part")
                draft.write_text(str(state.step * options.batch))
                draft.replace(progress)
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, step=0))
    say(f"ends {time.time()!r}")


def say(text: str) -> None:
    if hvd.rank() == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
