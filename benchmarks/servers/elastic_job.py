"""One worker of the elastic benchmark: trains on while servers come, go and die.

Worker 0 trains the same model by itself as well, shard by shard, and compares after every step.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hvd_order.torch as hvd
from benchmarks.servers.server_load import slices_of_servers
from hvd_order.engine import engine_host
from hvd_order.servers.worker.client import require_servers

_WIDTH, _ROWS, _CLASSES = 64, 32, 8
_LEARNT = 2  # steps in which the model is learnt: servers only sum
_TELL_APART = 1e-6
_AUDIT_S = 10.0
_REST_S = 0.002  # between steps: leaves the processors to servers that start


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    result = train(Path(job["stop"]))
    Path(job["result"]).with_suffix(f".{hvd.rank()}").write_text(json.dumps(result))
    hvd.shutdown()


def make_model() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(_WIDTH, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, _CLASSES)
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Another rate in each step: an update by another step's rule shows."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + 0.5 * math.sin(step))


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> Tensor:
    """Of one rank's rows."""
    numbers = torch.Generator().manual_seed(step)
    x = torch.randn(_ROWS, _WIDTH, generator=numbers).chunk(size)[rank]
    return nn.functional.mse_loss(model(x), x[:, :_CLASSES].sin())


class Alone:
    """The same training in one process: the mean of the ranks' gradients, rank by rank."""

    def __init__(self) -> None:
        self.model = make_model()
        self._optimizer = make_optimizer(self.model)
        self._schedule = make_schedule(self._optimizer)

    def take(self, step: int) -> None:
        size = hvd.size()
        self._optimizer.zero_grad()
        for rank in range(size):
            (loss_of(self.model, step, rank, size) / size).backward()
        self._optimizer.step()
        self._schedule.step()

    def apart(self, model: nn.Module) -> float:
        """Largest difference, relative to the largest weight of its tensor."""
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


def train(stop: Path) -> dict[str, Any]:
    """Steps until there is a file `stop`."""
    model, alone = make_model(), Alone()
    optimizer: Any = hvd.DistributedOptimizer(
        make_optimizer(model), named_parameters=model.named_parameters()
    )
    schedule = make_schedule(optimizer)
    steps: list[tuple[float, float]] = []  # begin and duration, seconds
    first_apart: list[float] = []  # step, its begin, how far
    worst, state = 0.0, ""
    while True:
        step, begin = len(steps), time.monotonic()
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank(), hvd.size()).backward()
        optimizer.step()
        schedule.step()
        optimizer.flush()
        steps.append((begin, time.monotonic() - begin))
        over = 0.0
        if hvd.rank() == 0:
            alone.take(step)
            apart = alone.apart(model)
            worst = max(worst, apart)
            if apart > _TELL_APART and not first_apart:
                first_apart = [step, begin, apart]
            now = whereabouts()
            if now != state:
                state = now
                print(json.dumps({"at": time.monotonic(), "step": step, **json.loads(now)}),
                      flush=True)  # fmt: skip
            over = float(stop.exists())
        if hvd.allreduce(torch.tensor(over), op=hvd.Sum) > 0:
            break
        time.sleep(_REST_S)
    hvd.barrier()
    held = audit() if hvd.rank() == 0 else []
    hvd.barrier()
    return {
        "steps": steps, "pushes": len(steps) - _LEARNT, "worst": worst,
        "first_apart": first_apart, "held": held,
    }  # fmt: skip


def _host() -> engine_host.EngineHost:
    host = engine_host.running_host()
    assert host is not None
    return host


def whereabouts() -> str:
    """On worker 0, in JSON: servers that have links, and those that own slices."""
    host = _host()
    owned = slices_of_servers()
    return json.dumps({"servers": sorted(require_servers(host).transport.servers()),
                       "owners": sorted(owned), "owned_slices": owned})  # fmt: skip


def audit() -> list[list[int]]:
    """On worker 0: server, slice, whether it owns it, version and checksum, of all slices.

    The last copies may be on their way for a moment.
    """
    host = _host()
    assert require_servers(host).coordinator is not None
    slices = len(require_servers(host).transport.places(max(host.models)))
    deadline = time.monotonic() + _AUDIT_S
    while True:
        everything = require_servers(host).coordinator.audit()
        entries = [(server, *entry) for server, held in everything.items() for entry in held]
        newest = max(entry[2] for entry in entries)
        held = [[server, *entry] for server, _, layout, *entry in entries if layout == newest]
        versions = {entry[3] for entry in held}
        if (len(held) == 2 * slices and len(versions) == 1) or time.monotonic() > deadline:
            return held
        time.sleep(0.05)


if __name__ == "__main__":
    main()
