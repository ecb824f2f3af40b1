"""How long until a model has learnt so much, on a slow link? See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.hosts import EmulatedHosts
from benchmarks.runner.fleet import RankFailed
from benchmarks.runner.places import emulated_hosts
from benchmarks.runner.question import WORKER_OPTION, Answer, ask, option
from benchmarks.runner.records.environment import ROOT
from benchmarks.runner.systems import SYSTEMS
from benchmarks.runner.workloads.workload import Workload
from benchmarks.torch.loss import TASKS, Task, loss_of

NAMES = ["ddp", "ddp_bf16", "ddp_powersgd", "hvd_order", "int8", "auto"]
HOSTS = 2
_TIMED = 10  # steps of one process
_LAST = 101  # ends of steps
_OVER = 50  # steps that a loss is the mean of
_RANK_S = 3600.0


class _Learner(nn.Module):
    """Maps a batch to its loss, and keeps it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.losses: list[Tensor] = []

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(self.inner, *batch)
        self.losses.append(loss.detach())
        return loss


def _work(task: Task, rank: int) -> Workload:
    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(rank)
    return Workload(
        _Learner(task.model()), lambda: task.batch(numbers), max_norm=1.0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=task.rate),
    )  # fmt: skip


def in_rank(options: argparse.Namespace) -> None:
    """Trains with each system; rank 0 writes when each step ended, and its loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name in options.systems:
        work = _work(TASKS[options.task](), dist.get_rank())
        trainer = SYSTEMS[name](work)
        dist.barrier()
        begin, ends = time.monotonic(), []
        for _ in range(options.steps):
            trainer.step()
            ends.append(time.monotonic() - begin)
        trainer.finish()
        losses = torch.stack(work.model.losses).tolist()
        found[name] = {"ends": ends, "losses": losses, "note": trainer.note()}
        dist.barrier()
        trainer.close()
        if dist.get_rank() == 0:
            print(f"{name}: {ends[-1]:.1f} s, loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        Path(options.worker).write_text(json.dumps(found))
    dist.destroy_process_group()


def local_s(task: Task) -> float:
    """A step of one process."""
    torch.set_num_threads(1)
    trainer = SYSTEMS["local"](_work(task, 0))
    times = []
    for _ in range(_TIMED):
        begin = time.monotonic()
        trainer.step()
        times.append(time.monotonic() - begin)
    return statistics.median(times)


def reached_s(ends: list[float], losses: list[float], target: float) -> float | None:
    """When the mean loss of so many steps was at most the target first."""
    for step in range(_OVER, len(losses) + 1):
        if statistics.fmean(losses[step - _OVER : step]) <= target:
            return ends[step - 1]
    return None


def measure(options: argparse.Namespace) -> Answer:
    task = TASKS[options.task]()
    compute_s = local_s(task)
    size_bytes = sum(p.nbytes for p in task.model().parameters())
    rate_mbit = 8e-6 * size_bytes / (options.ratio * compute_s)
    with tempfile.TemporaryDirectory(prefix="hvd_order_bench_") as folder:
        found = _train(options, rate_mbit, Path(folder) / "result.json")
    first = found[options.systems[0]]
    target = statistics.fmean(first["losses"][-_OVER:])
    print(
        f"{options.task}: a step computes {1e3 * compute_s:.0f} ms, its {size_bytes / 1e6:.1f} MB "
        f"take {options.ratio:g} times as long at {rate_mbit:.0f} Mbit/s; time to a loss of "
        f"{target:.3f}, which {options.systems[0]} has after {options.steps} steps"
    )
    summary = {}
    for name, each in found.items():
        seconds = reached_s(each["ends"], each["losses"], target)
        base = reached_s(first["ends"], first["losses"], target)
        step_s = statistics.median(b - a for a, b in pairwise(each["ends"][-_LAST:]))
        loss = statistics.fmean(each["losses"][-_OVER:])
        summary[name] = {"seconds": seconds, "step_s": step_s, "last_loss": loss}
        when = "not reached" if seconds is None else f"{seconds:.1f} s"
        if seconds is not None and base is not None:
            when += f", {seconds / base:.2f} of {options.systems[0]}"
        note = f"last steps {1e3 * step_s:.0f} ms, loss {loss:.3f}; {each['note']}"
        print(f"  {name:<14} {when}; {note}")
    return Answer(
        {"systems": found, "compute_s": compute_s, "rate_mbit": rate_mbit, "bytes": size_bytes},
        {"target": target, "systems": summary},
    )


def _train(options: argparse.Namespace, rate_mbit: float, path: Path) -> dict[str, Any]:
    """Runs the ranks on emulated hosts.

    Raises:
        RankFailed: with the log's name.
    """
    with emulated_hosts(HOSTS, rate_mbit) as place:
        assert isinstance(place.hosts, EmulatedHosts)
        command = [
            sys.executable, "-m", "benchmarks.torch.time_to_loss", *sys.argv[1:], WORKER_OPTION,
            str(path),
        ]  # fmt: skip
        ranks = [
            place.hosts.popen(
                host, command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stderr=None if host == 0 else place.log,
            )
            for host, env in enumerate(place.environment())
        ]  # fmt: skip
        for rank, process in enumerate(ranks):
            if process.wait(_RANK_S):
                raise RankFailed(
                    f"rank {rank} ended with {process.returncode}; see {place.log.name}"
                )
        found: dict[str, Any] = json.loads(path.read_text())
        return found


if __name__ == "__main__":
    sys.exit(ask(
        "time_to_loss", __doc__, measure,
        option("--task", "text", "what is learnt", choices=list(TASKS)),
        option("--systems", NAMES, "the loss is that of the first", choices=NAMES),
        option("--steps", 800, "of each system"),
        option("--ratio", 4.0, "communication of float32 over computation"),
        on_hosts=True,
        quick={"steps": 60, "ratio": 1.0, "systems": ["ddp", "int8"]},
        rank=in_rank,
    ))  # fmt: skip
