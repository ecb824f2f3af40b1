"""Are slow ranks and slow links named, with their cause, and soon? See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.hosts import EmulatedHosts
from benchmarks.runner.fleet import RankFailed
from benchmarks.runner.places import Place, emulated_hosts
from benchmarks.runner.question import WORKER_OPTION, Answer, ask, option
from benchmarks.runner.records.environment import ROOT

HOSTS = 4
CAUSES = {
    "backward": "backward pass", "loader": "loader", "layer": "backward pass",
    "cores": "cores", "link": "link",
}  # fmt: skip
_LAYERS, _WIDTH = 8, 512  # 8.4 MB of gradients
_PASS_S = 0.1  # forward and backward pass together
_JITTER = 0.05
_MOST = 40  # steps until the fault must be named
_BETWEEN = 30  # healthy steps before each fault
_RANK_S = 7200.0


class _Spend(torch.autograd.Function):
    """The identity; the passes take their time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Layer) -> Tensor:
        ctx.layer = layer
        layer.spend(_PASS_S / 3 / _LAYERS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.layer.spend(2 * _PASS_S / 3 / _LAYERS + ctx.layer.more_s)
        return grads[0], None


class _Layer(nn.Linear):
    """Sleeps as long as it computes; on the core that is shared, it computes."""

    def __init__(self) -> None:
        super().__init__(_WIDTH, _WIDTH)
        self.more_s = 0.0
        self.computes = False
        self._numbers = torch.Generator().manual_seed(os.getpid())

    def spend(self, seconds: float) -> None:
        jitter = 2 * torch.rand((), generator=self._numbers).item() - 1
        seconds *= 1 + _JITTER * jitter
        if not self.computes:
            time.sleep(seconds)
            return
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Spend.apply(super().forward(x), self)  # type: ignore[no-untyped-call]
        return torch.tanh(y)


class _Fault:
    """A fault of one rank, while it lasts."""

    def __init__(self, case: str, mine: bool, model: nn.Sequential, control: Path) -> None:
        self.loader_s = 0.15 if mine and case == "loader" else 0.0
        self._layers: list[_Layer] = list(model)  # type: ignore[arg-type]
        self._mine, self._case, self._control = mine, case, control
        self._other: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Before the healthy steps: what is no part of the fault."""
        if self._mine and self._case == "cores":
            os.sched_setaffinity(0, {0})
            for layer in self._layers:
                layer.computes = True

    def begin(self) -> None:
        if not self._mine:
            return
        if self._case == "backward":
            for layer in self._layers:
                layer.more_s = 0.2 / _LAYERS
        elif self._case == "layer":
            self._layers[_LAYERS // 2].more_s = 0.2
        elif self._case == "cores":
            self._other = subprocess.Popen(
                [sys.executable, "-c", "import os\nos.sched_setaffinity(0, {0})\nwhile True: pass"]
            )
        elif self._case == "link":
            self._control.write_text("slow")

    def end(self) -> None:
        self.loader_s = 0.0
        for layer in self._layers:
            layer.more_s, layer.computes = 0.0, False
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        if self._other is not None:
            self._other.kill()
            self._other.wait()
        if self._mine and self._case == "link":
            self._control.write_text("well")


def in_rank(options: argparse.Namespace) -> None:
    """Runs the cases one after the other; rank 0 writes what was named."""
    import hvd_order.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(_Layer() for _ in range(_LAYERS)))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    folder = Path(options.worker).parent

    def step(loader_s: float = 0.0) -> None:
        time.sleep(loader_s)
        optimizer.zero_grad()
        model(torch.ones(4, _WIDTH)).square().mean().backward()
        optimizer.step()

    for _ in range(options.first_steps):
        step()
    alarms, healthy = 0, 0
    for _ in range(options.healthy):
        step()
        healthy += 1
        now = optimizer.stats().slow_rank
        alarms += now >= 0
    runs = []
    for number in range(options.runs):
        for case in options.cases:
            rank = (number + 1) % hvd.size()
            fault = _Fault(case, hvd.rank() == rank, model, folder / f"link{rank}")
            fault.prepare()
            for _ in range(_BETWEEN):
                step()
            before = optimizer.stats()
            fault.begin()
            named = None
            for taken in range(1, 2 * _MOST + 1):
                step(fault.loader_s)
                stats = optimizer.stats()
                if stats.slow_rank >= 0 and named is None:
                    named = taken
                # All ranks end the case together, whatever they have seen.
                if taken % 10 == 0 and named is not None:
                    break
            found = optimizer.stats()
            fault.end()
            runs.append({
                "case": case, "rank": rank, "named": named, "found": found.slow_rank,
                "cause": found.slow_cause, "detail": found.slow_detail,
                "step_s": found.step_s, "slow_s": found.slow_s, "without_s": found.without_s,
                "healthy_s": before.step_s, "alarm_before": before.slow_rank >= 0,
                "clock_error_s": found.clock_error_s,
            })  # fmt: skip
            if hvd.rank() == 0:
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    if hvd.rank() == 0:
        text = json.dumps({"runs": runs, "healthy": healthy, "alarms": alarms})
        Path(options.worker).write_text(text)
    hvd.shutdown()


def is_right(run: dict[str, Any]) -> bool:
    """Whether rank and cause were named in time."""
    return (
        run["named"] is not None
        and run["named"] <= _MOST
        and run["found"] == run["rank"]
        and run["cause"] == CAUSES[run["case"]]
    )


def measure(options: argparse.Namespace) -> Answer:
    with (
        tempfile.TemporaryDirectory(prefix="hvd_order_bench_") as folder,
        emulated_hosts(HOSTS, options.rate_mbit) as place,
    ):
        found = _run(options, place, Path(folder))
    summary: dict[str, Any] = {"healthy": found["healthy"], "alarms": found["alarms"]}
    print(f"{found['healthy']} healthy steps: {found['alarms']} of them with an alarm")
    for case in options.cases:
        runs = [run for run in found["runs"] if run["case"] == case]
        right = [run for run in runs if is_right(run)]
        off = [run["without_s"] / run["healthy_s"] for run in right]
        steps = [run["named"] for run in right]
        summary[case] = {
            "runs": len(runs), "right": len(right),
            "steps": statistics.median(steps) if steps else None,
            "most_steps": max(steps, default=None),
            "without_of_healthy": statistics.median(off) if off else None,
        }  # fmt: skip
        print(f"  {case:<10} {len(right)} of {len(runs)} right: {summary[case]}")
    return Answer({"runs": found["runs"]}, summary)


def _run(options: argparse.Namespace, place: Place, folder: Path) -> dict[str, Any]:
    """Runs the ranks, and slows links when they say so.

    Raises:
        RankFailed: with the log's name.
    """
    assert isinstance(place.hosts, EmulatedHosts)
    path = folder / "result.json"
    command = [
        sys.executable, "-m", "benchmarks.torch.slow_ranks", *sys.argv[1:], WORKER_OPTION, str(path)
    ]  # fmt: skip
    ranks = [
        place.hosts.popen(
            host, command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stderr=None if host == 0 else place.log,
        )
        for host, env in enumerate(place.environment())
    ]  # fmt: skip
    told: dict[int, str] = {}
    end = time.monotonic() + _RANK_S
    while any(process.poll() is None for process in ranks):
        for rank, process in enumerate(ranks):
            if process.poll() or time.monotonic() > end:
                raise RankFailed(f"rank {rank} ended with {process.poll()}; see {place.log.name}")
            control = folder / f"link{rank}"
            word = control.read_text() if control.exists() else ""
            if word and word != told.get(rank):
                told[rank] = word
                rate = options.rate_mbit / (4 if word == "slow" else 1)
                place.hosts.set_rate(rank, rate)
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    sys.exit(ask(
        "slow_ranks", __doc__, measure,
        option("--cases", list(CAUSES), "one after the other", choices=list(CAUSES)),
        option("--runs", 20, "of each case, with another rank each"),
        option("--healthy", 10000, "steps without a fault, before the cases"),
        option("--first-steps", 330, "in which slices are tried"),
        option("--rate-mbit", 1000.0, "of each host's link"),
        on_hosts=True,
        quick={"runs": 1, "healthy": 20, "first_steps": 20, "cases": ["backward"]},
        rank=in_rank,
    ))  # fmt: skip
