"""Parameter servers for tests: real processes, with a store and a secret of their own.

A test starts them and gives `Servers.env` to ranks: to those of a pool by `job`, which begins a new
job in each of them, or to fresh ones by ``start_script(..., env=servers.env)``.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.flags import wait_until
from helpers.ranks import AnyProcess, rank_environment, start_process
from torch import Tensor
from torch.optim import Optimizer

import hvd_order.torch as hvd
from hvd_order.engine.engine_host import engine_host
from hvd_order.launch.jobs.torch_agent import serve_store
from hvd_order.servers.access.secret import new_secret
from hvd_order.servers.worker import connections
from hvd_order.servers.worker.client import ParameterServers, require_servers

__all__ = [
    "Servers",
    "Training",
    "audit",
    "from_undisturbed",
    "job",
    "servers_of_job",
    "small_adam",
    "tell_apart",
    "train_until",
]

WIDTH, ROWS = 8, 12  # rows divide by 2 and 3
_PATIENCE = timedelta(seconds=60)


class Servers:
    """Parameter servers of one job. A context manager; it ends those that still run.

    Attributes:
        env: variables for workers, for further servers and for tools.
        workers: of the job.
    """

    def __init__(
        self,
        workers: int,
        count: int,
        env: Mapping[str, str] | None = None,
        in_order: bool = False,
    ) -> None:
        """Starts them; workers may start at once, they wait.

        Args:
            env: further variables, for servers and workers.
            in_order: one after the other, so that `pids` has them by their numbers.
        """
        self.workers = workers
        self._store = serve_store("127.0.0.1")
        self.env = {
            "HVD_ORDER_SERVER_STORE": f"127.0.0.1:{self._store.port}",
            "HVD_ORDER_SERVERS": str(count),
            "HVD_ORDER_SECRET": new_secret().hex(),
            "HVD_ORDER_COMM": "ps",
            "HVD_ORDER_TIMEOUT": "60",
            # Several slices of the small models here, and no trials of other sizes.
            "HVD_ORDER_SLICE_BYTES": "256",
            **(env or {}),
        }
        self._folder = tempfile.TemporaryDirectory(prefix="hvd_order_servers_")
        self._processes: list[AnyProcess] = []
        try:
            for server in range(count):
                self.start()
                if in_order:
                    self._await(server)
        except BaseException:
            self.__exit__()
            raise

    def start(self) -> None:
        """Starts one more."""
        log = self._log(len(self._processes))
        options = ["serve", "--workers", str(self.workers)]
        self._processes.append(
            start_process("hvd_order.tools.cli", options, self.environment(), log, log)
        )

    def _await(self, server: int) -> None:
        meeting = connections.MeetingPoint(self.env["HVD_ORDER_SERVER_STORE"], _PATIENCE)
        connections.wait_for(meeting.own(), f"server/{server}", _PATIENCE, "it does not come")

    @staticmethod
    def command(*arguments: str) -> list[str]:
        """A command line of ``hvd-order``."""
        return [sys.executable, "-m", "hvd_order.tools.cli", *arguments]

    def environment(self) -> dict[str, str]:
        """All variables for a process that is no worker."""
        env = rank_environment(0, 1, 0, self.env)
        return {name: value for name, value in env.items() if name not in ("RANK", "WORLD_SIZE")}

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of their start; numbers are given as they arrive."""
        return [process.pid for process in self._processes]

    def log(self) -> str:
        """What all of them have said."""
        return "".join(self._log(i).read_text() for i in range(len(self._processes)))

    def wait_for_log(self, text: str, timeout: float = 60.0) -> None:
        """Waits until one of them has said `text`."""
        wait_until(lambda: text in self.log(), lambda: f"{text!r} in\n{self.log()}", timeout)

    def wait(self, timeout: float = 30.0) -> list[int]:
        """Waits for their end, with the job. Returns their exit codes."""
        deadline = time.monotonic() + timeout
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"a server runs on after {timeout:g} s:\n{self.log()}"
                ) from None
        return codes

    def _log(self, place: int) -> Path:
        return Path(self._folder.name) / f"{place}.log"

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._folder.cleanup()


# ---------------------------------------------------------------------------------- in a rank


@contextlib.contextmanager
def job(env: Mapping[str, str]) -> Iterator[None]:
    """In a rank of a pool: a job with these variables in place of the pool's."""
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("HVD_ORDER_")]:
            patch.delenv(name)
        for name, value in env.items():
            patch.setenv(name, value)
        hvd.init()
        try:
            yield
        finally:
            hvd.shutdown()


def servers_of_job() -> ParameterServers:
    """Those of this rank's job."""
    return require_servers(engine_host())


class Training:
    """A small model with two groups of parameters and a learning rate that falls.

    Attributes:
        losses: of this rank's rows, by step.
        pauses: duration of each step, seconds.
    """

    def __init__(
        self,
        make: Callable[[Sequence[Mapping[str, Any]]], Optimizer],
        distributed: bool,
        dtype: torch.dtype = torch.float32,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins.

        Args:
            make: the optimizer for groups of parameters.
            before: `state` of a training that this one continues.
        """
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(),
            torch.nn.Linear(16, 2),
        ).to(dtype)  # fmt: skip
        named = dict(self.model.named_parameters())
        self._own = make([
            {"params": [p for name, p in named.items() if "weight" in name]},
            {"params": [p for name, p in named.items() if "bias" in name], "lr": 0.003},
        ])  # fmt: skip
        self._schedule = torch.optim.lr_scheduler.ExponentialLR(self._own, 0.98)
        self._distributed = distributed
        self.step = 0
        self.losses: list[float] = []
        self.pauses: list[float] = []
        if before is not None:
            self.step = before["step"]
            self.model.load_state_dict(before["model"])
            self._own.load_state_dict(copy.deepcopy(before["optimizer"]))  # it would share
            self._schedule.load_state_dict(before["schedule"])
        self.optimizer = self._own
        if distributed:
            self.optimizer = hvd.DistributedOptimizer(
                self._own, named_parameters=self.model.named_parameters()
            )

    def run(self, steps: int) -> Training:
        """Takes further steps."""
        for _ in range(steps):
            begin = time.monotonic()
            self._take_step()
            self.pauses.append(time.monotonic() - begin)
        if self._distributed:
            self.optimizer.flush()  # type: ignore[attr-defined]
        return self

    def _take_step(self) -> None:
        numbers = torch.Generator().manual_seed(self.step)
        dtype = next(self.model.parameters()).dtype
        x = torch.randn(ROWS, WIDTH, generator=numbers).to(dtype)
        y = torch.stack([x.sum(1).sin(), x[:, 0]], dim=1)
        if self._distributed:
            x, y = (whole.chunk(hvd.size())[hvd.rank()] for whole in (x, y))
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self._schedule.step()
        self.losses.append(loss.item())
        self.step += 1

    def weights(self) -> dict[str, Tensor]:
        """A copy of all parameters."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def state(self) -> dict[str, Any]:
        """A checkpoint: a copy."""
        return {
            "step": self.step,
            "model": self.weights(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "schedule": self._schedule.state_dict(),
        }

    def digest(self) -> str:
        """Of all parameters."""
        whole = hashlib.sha256()
        for name, tensor in self.weights().items():
            whole.update(name.encode() + tensor.numpy().tobytes())
        return whole.hexdigest()


def small_adam(groups: Any) -> torch.optim.Adam:
    """For trainings of thousands of steps."""
    return torch.optim.Adam(groups, lr=0.001)


def train_until(training: Training, over: Callable[[], bool]) -> None:
    """Trains until rank 0 finds that it is ``over()``."""
    for step in itertools.count():
        training.run(1)
        # Every rank must take as many steps.
        enough = float(hvd.rank() == 0 and over())
        if hvd.allreduce(torch.tensor(enough), op=hvd.Sum) > 0:
            return
        assert step < 20_000, "what was to happen does not"
        time.sleep(0.002)  # leaves the processors to those who come


def from_undisturbed(
    training: Training, make: Callable[[Sequence[Mapping[str, Any]]], Optimizer] = small_adam
) -> dict[str, float]:
    """How a training differs from one that nothing happens to."""
    undisturbed = Training(make, distributed=True).run(training.step)
    return tell_apart(training.state(), undisturbed.state())


def tell_apart(a: Any, b: Any, path: str = "") -> dict[str, float]:
    """Where two states differ: by path, the largest difference relative to the largest value.

    Infinity: in kind, keys or size.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return {path: float("inf")}
        if a.numel() == 0:
            return {}
        apart = float((a.double() - b.double()).abs().max())
        return {path: apart / max(float(b.double().abs().max()), 1e-30)} if apart else {}
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        entries = [(str(key), a[key], b[key]) for key in a]
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        entries = [(str(i), *pair) for i, pair in enumerate(zip(a, b, strict=True))]
    else:
        return {} if a == b else {path: float("inf")}
    out: dict[str, float] = {}
    for key, left, right in entries:
        out |= tell_apart(left, right, f"{path}/{key}")
    return out


def audit(complete: Callable[[dict[int, list[list[int]]]], bool]) -> dict[int, list[list[int]]]:
    """On rank 0: what each server holds of the newest model, once that is ``complete``.

    Slices may be on their way to another server for a moment after a step.
    """
    coordinator = servers_of_job().coordinator
    assert coordinator is not None
    deadline = time.monotonic() + 10
    while True:
        model = max(engine_host().models)
        everything = coordinator.audit()
        layout = max(entry[1] for held in everything.values() for entry in held)
        mine = {
            server: [entry for entry in held if entry[:2] == [model, layout]]
            for server, held in everything.items()
        }
        if complete(mine) or time.monotonic() > deadline:
            return mine
        time.sleep(0.05)
