"""The training of all-reduce and server jobs: ``train.py STEPS PACE_S float32|float64``."""

from __future__ import annotations

import sys
import time

from chaos.programs.diary import Diary, become_odd


def main(steps: int, pace_s: float, precision: str) -> None:
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
    model = small_model().to(getattr(torch, precision))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=problem.LEARNING_RATE, momentum=problem.MOMENTUM),
        named_parameters=model.named_parameters(),
    )
    for step in range(steps):
        x, y = (
            torch.from_numpy(rows).to(getattr(torch, precision))
            for rows in problem.batch(step, hvd.rank(), hvd.size())
        )
        optimizer.zero_grad()
        (model(x).squeeze(1) - y).square().mean().backward()
        optimizer.step()
        diary.note(f"step {step + 1}")
        time.sleep(pace_s)
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
