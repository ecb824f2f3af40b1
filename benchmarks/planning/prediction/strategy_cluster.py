"""A job with ParameterServerStrategy on emulated hosts, told what to do command by command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.hosts import EmulatedHosts

_JOB = "benchmarks.planning.prediction.strategy_job"
_PORT = 29800
_LIMIT_S = 300


class _Process:
    """Answers each command with a line; ended if it takes too long."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.answer()

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(_LIMIT_S, self._process.kill)
        timer.start()
        try:
            if line := self._process.stdout.readline():
                return json.loads(line)
        finally:
            timer.cancel()
        raise SystemExit(f"a process of the job ended with {self._process.wait()}")


class StrategyCluster:
    """A coordinator, workers and a server, each on a host of its own.

    The coordinator has a host of its own, so that what it sends to workers takes nothing of the
    server's link.
    """

    def __init__(
        self,
        workers: int,
        layers: Sequence[Sequence[int]],
        rate_mbit: float,
        **queues: Any,
    ) -> None:
        """Takes the number of elements of each tensor of each layer.

        ``queues``: arguments of `EmulatedHosts`.
        """
        self._hosts = EmulatedHosts(workers + 2, rate_mbit, **queues)
        self._count = workers + 2
        tasks = [*(("worker", i) for i in range(workers)), ("ps", 0), ("chief", 0)]
        places = [f"{address}:{_PORT}" for address in self._hosts.addresses]
        cluster = {"worker": places[:workers], "ps": places[workers:-1], "chief": places[-1:]}
        job = {"cluster": cluster, "layers": layers}
        try:
            started = [
                self._start(host, {**job, "task": task, "index": index})
                for host, (task, index) in enumerate(tasks)
            ]
            each = [_Process(process) for process in started]
        except BaseException:
            self._hosts.close()
            raise
        self.workers, self.servers = each[:workers], each[workers:-1]
        self.coordinator = each[-1]

    def _start(self, host: int, job: dict[str, Any]) -> subprocess.Popen[str]:
        return self._hosts.popen(
            host, [sys.executable, "-m", _JOB, json.dumps(job)],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def set_rate(self, rate_mbit: float) -> None:
        """Of all links."""
        for host in range(self._count):
            self._hosts.set_rate(host, rate_mbit)

    def set_layers(self, seconds: Sequence[float]) -> None:
        """The mean time of each layer, forward and then backward."""
        for worker in self.workers:
            worker.ask("layers", seconds=list(seconds))

    def run(self, steps: int) -> list[list[float]]:
        """Runs so many steps for each worker.

        Returns:
            By worker, when steps began.
        """
        for worker in self.workers:
            worker.ask("begins")
        self.coordinator.ask("run", steps=steps * len(self.workers))
        return [worker.ask("begins") for worker in self.workers]

    def trace(self, folder: Path, do: str, **arguments: Any) -> tuple[str, list[str]]:
        """Traces the first worker and all servers while the coordinator does something.

        Returns:
            Folders of the worker's trace and of the servers' traces.
        """
        worker, servers = folder / "worker", [folder / f"ps{i}" for i in range(len(self.servers))]
        traced = list(zip([self.workers[0], *self.servers], [worker, *servers], strict=True))
        for process, place in traced:
            process.ask("trace", folder=str(place))
        self.coordinator.ask(do, **arguments)
        for process, _ in traced:
            process.ask("stop")
        return str(worker), [str(each) for each in servers]

    def __enter__(self) -> StrategyCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hosts.close()
