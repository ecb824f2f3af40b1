"""A small elastic training whose every loss and last weights are known in advance.

As a script it trains; `reference` computes the same in one process, without hvd_order. In double
precision, so that sums in another order differ by no more than 1e-12.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch

BATCH = 12  # divides by 1, 2 and 3 ranks
COMMIT_EVERY = 10


def make() -> tuple[torch.nn.Module, torch.optim.SGD, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, torch.randn(4096, 16, dtype=torch.float64)


def samples(data: torch.Tensor, step: int) -> torch.Tensor:
    places = torch.arange(step * BATCH, (step + 1) * BATCH) % len(data)
    return data[places]


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(1) - x.sum(1).sin()).square().mean()


def weights_of(model: torch.nn.Module) -> list[float]:
    """Sum and sum of squares of each parameter, and their first element."""
    return [
        float(value)
        for p in model.parameters()
        for value in (p.detach().sum(), p.detach().square().sum(), p.detach().flatten()[0])
    ]


def reference(steps: int) -> tuple[list[float], list[float]]:
    """The loss of each step, and `weights_of` the model after the last."""
    model, optimizer, data = make()
    losses = []
    for step in range(steps):
        loss = loss_of(model, samples(data, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, weights_of(model)


def main(steps: int, pace_s: float, sizes: dict[int, int]) -> None:
    """Trains as a rank of an elastic job; rank 0 prints each step.

    Args:
        steps: how many.
        pace_s: how long each takes at least, for the computation of a real model.
        sizes: step -> size; the step is not begun until the job has so many ranks.
    """
    import time

    import hvd_order.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    model, inner, data = make()
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        say(f"rank {hvd.rank()} of {hvd.size()} pid {os.getpid()} begins at {state.step}")
        while state.step < steps:
            if sizes.get(state.step, hvd.size()) != hvd.size() and hvd.rank() == 0:
                say(f"waits at {state.step}")
            while sizes.get(state.step, hvd.size()) != hvd.size():
                state.check_host_updates()
                time.sleep(0.05)
            x = samples(data, state.step)[hvd.rank() :: hvd.size()]
            loss = loss_of(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = float(hvd.allreduce(loss.detach()))
            if hvd.rank() == 0:
                say(f"step {state.step} loss {mean!r} at {time.time()!r}")
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()
            time.sleep(pace_s)

    train(hvd.elastic.TorchState(model, optimizer, step=0))
    weights = weights_of(model)
    same = hashlib.sha256(repr(weights).encode()).hexdigest()
    assert len(set(hvd.allgather_object(same))) == 1, "ranks ended with different weights"
    if hvd.rank() == 0:
        say(f"weights {weights!r}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    waits = [pair.split(":") for pair in sys.argv[3:]]
    main(int(sys.argv[1]), float(sys.argv[2]), {int(step): int(size) for step, size in waits})
