"""Starting a benchmark's own script as several ranks, and what the ranks need."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import hvd_order.torch as hvd
from benchmarks.runner.question import WORKER_OPTION
from hvd_order.engine.engine_host import EngineHost
from hvd_order.engine.job import process
from hvd_order.launch.request import LaunchRequest, OutputRules
from hvd_order.launch.run import run


def run_ranks(size: int, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> Any:
    """Runs this module as ``size`` ranks on this host; returns what rank 0 wrote.

    Args:
        size: how many.
        arguments: of the script.
        env: variables for the ranks, on top of this process's own.

    Raises:
        SystemExit: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="hvd_order_bench_") as folder:
        path = Path(folder) / "result.json"
        module = sys.modules["__main__"].__spec__  # None of a script that is started by its path
        start = [sys.argv[0]] if module is None else ["-m", module.name]
        command = [sys.executable, *start, *arguments, WORKER_OPTION, str(path)]
        code = run(LaunchRequest(command, size, env or {}, output=OutputRules(prefix=False)))
        if code != 0:
            raise SystemExit(code)
        return json.loads(path.read_text())


def run_as_rank(worker: Callable[[torch.device], Any], path: str, device_type: str) -> None:
    """Calls ``worker`` between init and shutdown; rank 0's answer goes to ``path``."""
    torch.set_num_threads(1)
    hvd.init()
    device = torch.device("cpu")
    if device_type == "cuda":
        # More ranks than devices share them; the back end is then Gloo.
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    result = worker(device)
    if hvd.rank() == 0:
        Path(path).write_text(json.dumps(result))
    hvd.barrier()
    hvd.shutdown()


def new_host(**knobs: Any) -> EngineHost:
    """An engine of its own with some knobs changed, wired as the optimizers' engine is.

    Collective. It lives until shutdown.
    """
    job = copy.copy(process.current())  # shares the list of groups and of callbacks
    job.config = job.config.with_values(**knobs)
    groups = {
        purpose: job.new_group(purpose, backend)
        for purpose, backend in (("registration", "gloo"), ("control", "gloo"), ("gradients", None))
    }
    host = EngineHost(job, 0, range(job.size), groups)
    job.on_shutdown(host.close)
    return host


def slowest(seconds: Sequence[float]) -> list[float]:
    """For each measurement the time of the rank that took longest."""
    times = hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), op=hvd.Max)
    return [float(time) for time in times]


def seconds_of(work: Callable[[], None], device: torch.device) -> float:
    """How long ``work`` takes this rank, when all start together."""
    finish(device)
    hvd.barrier()
    begin = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - begin


def finish(device: torch.device) -> None:
    """Waits for everything enqueued on the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
