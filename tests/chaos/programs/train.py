"""The training of jobs with PyTorch: ``train.py STEPS PACE_S float32|float64|elastic``."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

from chaos.programs.diary import Diary, become_odd

COMMIT_EVERY = 5


def main(steps: int, pace_s: float, how: str) -> None:
    become_odd()
    diary = Diary()
    diary.note("import")
    import torch
    from chaos.programs import problem

    import hvd_order.torch as hvd

    diary.note("init")
    hvd.init()
    diary.note("up")
    torch.set_num_threads(1)
    dtype = torch.float32 if how == "float32" else torch.float64
    model = small_model().to(dtype)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=problem.LEARNING_RATE, momentum=problem.MOMENTUM),
        named_parameters=model.named_parameters(),
    )

    def train(state: Any) -> None:
        diary.note(f"begins {state.step}")
        while state.step < steps:
            x, y = (
                torch.from_numpy(rows).to(dtype)
                for rows in problem.batch(state.step, hvd.rank(), hvd.size())
            )
            optimizer.zero_grad()
            (model(x).squeeze(1) - y).square().mean().backward()
            optimizer.step()
            state.step += 1
            diary.note(f"step {state.step}")
            if how == "elastic" and state.step % COMMIT_EVERY == 0:
                state.commit()
                diary.note("commit")
            time.sleep(pace_s)

    if how == "elastic":
        hvd.elastic.run(train)(hvd.elastic.TorchState(model, optimizer, step=0))
    else:
        train(SimpleNamespace(step=0))
    optimizer.flush()
    diary.keep([p.detach().numpy() for p in model.parameters()])
    diary.note("trained")
    hvd.shutdown()
    diary.note("end")


def small_model():  # type: ignore[no-untyped-def]  # torch is imported late
    """As `problem` has it."""
    import torch
    from chaos.programs import problem

    width, hidden = problem.WIDTH, problem.HIDDEN
    model = torch.nn.Sequential(
        torch.nn.Linear(width, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, hidden),
        torch.nn.Tanh(), torch.nn.Linear(hidden, 1),
    ).double()  # fmt: skip
    with torch.no_grad():
        for p, value in zip(model.parameters(), problem.initial(), strict=True):
            p.copy_(torch.from_numpy(value))
    return model


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
