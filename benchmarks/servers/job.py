"""One worker of the benchmark; worker 0 prints lines of JSON."""

from __future__ import annotations

import json
import select
import sys
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import hvd_order.torch as hvd
from benchmarks.runner.workloads.emulated_device import EmulatedModel, model_input
from benchmarks.runner.workloads.profiles import PROFILES
from hvd_order.engine import engine_host
from hvd_order.engine.job import process
from hvd_order.planning.files.profiled_servers import document_of
from hvd_order.servers.costs import server_costs
from hvd_order.servers.worker.client import ParameterServers, require_servers, servers_of

_REST_S = 0.002  # between steps: leaves the processors to servers that start


def raw(job: dict[str, Any]) -> dict[str, Any]:
    """Pushes and pulls a buffer, piece by piece, as fast as it goes."""
    transport = engine_host.engine_host().transport
    size, piece = job["bytes"] // 4, job["piece_bytes"] // 4
    buffer = torch.ones(size)
    pieces = list(buffer.split(piece))
    seconds = []
    for repeat in range(job["repeats"] + 1):
        hvd.barrier()
        buffer.fill_(1.0)
        seconds.append(transport.time_stream(pieces, job["in_flight"]))
        assert bool((buffer == hvd.size()).all()), f"wrong sum in repeat {repeat}"
    return {"seconds": seconds[1:]}


def steps(job: dict[str, Any]) -> dict[str, Any]:
    """Trains a model whose layers sleep.

    After "warm_up" steps updates count as late, and with "record" worker 0 says what servers cost.

    Returns:
        seconds: of worker 0's steps.
        owned_slices: after each of them, by server, if the job asks for "owned".
        ends: of each worker's steps; all hosts are on one machine, so they have one clock.
        events, updates: of worker 0's steps, when layers ran and how long ``step()`` took.
        late: slices of all workers whose update came too late for the delay bound.
        servers: their costs, as ``hvd-order profile --servers`` sums up; None without "record".
        same: whether all workers ended with the same weights.
    """
    profile = PROFILES[job["model"]]().scaled_to(job["compute_s"]).shrunk(job.get("shrink", 1))
    model = EmulatedModel(profile, hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    momentum = job.get("momentum", 0.9)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ends, events, updates, owned_slices = [time.monotonic()], [], [], []
    late_before, warm_up, record = 0, job.get("warm_up", 0), job.get("record", False)
    for step in range(job["steps"]):
        if step == warm_up:
            late_before = late()
            if record:
                servers().record()
        optimizer.zero_grad()
        model(model_input()).backward()
        begin = time.monotonic()
        optimizer.step()
        ends.append(time.monotonic())
        updates.append(ends[-1] - begin)
        events.append(list(model.recorder.events))
        model.recorder.events.clear()
        if job.get("owned"):
            owned_slices.append(slices_of_servers())
    seconds = [end - begin for begin, end in pairwise(ends)]
    costs = costs_of_servers(seconds[warm_up:]) if record else None
    optimizer.flush()
    found = hvd.allgather_object((ends[1:], late() - late_before))
    return {
        "seconds": seconds, "owned_slices": owned_slices, "ends": [each for each, _ in found],
        "events": events, "updates": updates, "late": sum(each for _, each in found),
        "servers": costs, "same": same_weights(model),
    }  # fmt: skip


def servers() -> ParameterServers:
    host = engine_host.running_host()
    assert host is not None
    return require_servers(host)


def late() -> int:
    """Slices whose update came too late for the delay bound, so far."""
    host = engine_host.running_host()  # none of one worker alone
    known = None if host is None else servers_of(host)
    return 0 if known is None else known.transport.dropped()[0]


def costs_of_servers(steps_s: list[float]) -> dict[str, Any]:
    job = process.current()
    times = servers().take_times()
    return document_of(
        server_costs(times, job.size, job.config.ps_mode, job.config.ps_update, steps_s)
    )


def train(_: dict[str, Any]) -> dict[str, Any]:
    """Steps of a small model until worker 0's standard input ends; it tells what servers own."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    x = torch.randn(16, 64)
    steps: list[tuple[float, float]] = []  # begin and duration, seconds
    told: dict[str, Any] = {}
    over = False
    while not over:
        begin = time.monotonic()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :8].sin()).backward()
        optimizer.step()
        optimizer.flush()
        steps.append((begin, time.monotonic() - begin))
        stop = 0.0
        if hvd.rank() == 0:
            owned = slices_of_servers()
            now = {"servers": sorted(servers().transport.servers()),
                   "owners": sorted(owned), "owned_slices": owned}  # fmt: skip
            if now != told:
                told = now
                said = {"at": time.monotonic(), "step": len(steps) - 1, **now}
                print(json.dumps(said), flush=True)
            stop = float(bool(select.select([sys.stdin], [], [], 0)[0]))
        over = hvd.allreduce(torch.tensor(stop), op=hvd.Sum).item() > 0
        time.sleep(_REST_S)
    assert same_weights(model), "the workers' weights differ"
    return {"results": [{"steps": each} for each in hvd.allgather_object(steps)]}


def same_weights(model: nn.Module) -> bool:
    """Whether all workers have the same; collective."""
    sums = [float(p.detach().double().sum()) for p in model.parameters()]
    return all(each == sums for each in hvd.allgather_object(sums))


def slices_of_servers() -> dict[int, int]:
    """How many of the newest model's slices each server owns; empty before they are cut."""
    host = engine_host.running_host()
    known = None if host is None else servers_of(host)
    if host is None or known is None or not host.models:
        return {}
    places = known.transport.places(max(host.models))
    return dict(sorted(Counter(owner for owner, _ in places).items()))


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    answer = {"raw": raw, "steps": steps, "train": train}[job["what"]](job)
    if hvd.rank() == 0:
        print(json.dumps(answer), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
