"""One worker of the benchmark; worker 0 prints a line of JSON.

The job has "steps" and "warm_up" of them; with "record" worker 0 says what the servers cost. "late"
counts updates after the warm-up, in which servers only sum. Of one worker alone, "updates" are the
durations of its updates.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from typing import Any

import torch

import hvd_order.torch as hvd
from benchmarks.runner.workloads.emulated_device import EmulatedModel, model_input
from benchmarks.runner.workloads.profiles import PROFILES
from hvd_order.engine.engine_host import running_host
from hvd_order.engine.job import process
from hvd_order.planning.files.profiled_servers import document_of
from hvd_order.servers.costs import server_costs
from hvd_order.servers.worker.client import ParameterServers, require_servers, servers_of


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    profile = PROFILES[job["model"]]().scaled_to(job["compute_s"]).shrunk(job["shrink"])
    model = EmulatedModel(profile, hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ends, events, updates = [], [], []
    late_before = 0
    for step in range(job["steps"]):
        if step == job["warm_up"]:
            late_before = _late()
            if job["record"]:
                _servers().record()
        optimizer.zero_grad()
        model(model_input()).backward()
        begin = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - begin)
        # All hosts are on one machine, so they have one clock.
        ends.append(time.monotonic())
        events.append(list(model.recorder.events))
        model.recorder.events.clear()
    costs = _costs(ends[job["warm_up"] - 1 :]) if job["record"] else None
    optimizer.flush()
    found = hvd.allgather_object((ends, _late() - late_before))
    if hvd.rank() == 0:
        answer = {"ends": [each for each, _ in found], "late": sum(each for _, each in found),
                  "events": events, "updates": updates, "servers": costs}  # fmt: skip
        print(json.dumps(answer), flush=True)
    hvd.shutdown()


def _late() -> int:
    """Slices whose update came too late for the delay bound, so far."""
    host = running_host()  # none of one worker alone
    servers = None if host is None else servers_of(host)
    return 0 if servers is None else servers.transport.dropped()[0]


def _servers() -> ParameterServers:
    host = running_host()
    assert host is not None
    return require_servers(host)


def _costs(ends: list[float]) -> dict[str, Any]:
    """As ``hvd-order profile --servers`` sums up."""
    job = process.current()
    steps_s = [end - begin for begin, end in pairwise(ends)]
    times = _servers().take_times()
    return document_of(
        server_costs(times, job.size, job.config.ps_mode, job.config.ps_update, steps_s)
    )


if __name__ == "__main__":
    main()
