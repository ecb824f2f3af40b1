"""The training of elastic jobs: ``train_elastic.py STEPS PACE_S``."""

from __future__ import annotations

import sys
import time

from chaos.programs.diary import Diary, become_odd

COMMIT_EVERY = 5


def main(steps: int, pace_s: float) -> None:
    become_odd()
    diary = Diary()
    diary.note("import")
    import torch
    from chaos.programs import problem
    from chaos.programs.train import small_model

    import hvd_order.torch as hvd

    diary.note("init")
    hvd.init()
    diary.note("up")
    torch.set_num_threads(1)
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=problem.LEARNING_RATE, momentum=problem.MOMENTUM),
        named_parameters=model.named_parameters(),
    )

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        diary.note(f"begins {state.step}")
        while state.step < steps:
            x, y = (
                torch.from_numpy(rows) for rows in problem.batch(state.step, hvd.rank(), hvd.size())
            )
            optimizer.zero_grad()
            (model(x).squeeze(1) - y).square().mean().backward()
            optimizer.step()
            state.step += 1
            diary.note(f"step {state.step}")
            if state.step % COMMIT_EVERY == 0:
                state.commit()
                diary.note("commit")
            time.sleep(pace_s)

    train(hvd.elastic.TorchState(model, optimizer, step=0))
    diary.keep([p.detach().numpy() for p in model.parameters()])
    diary.note("trained")
    hvd.shutdown()
    diary.note("end")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
