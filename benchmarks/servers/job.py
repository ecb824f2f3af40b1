"""One worker of the benchmark; worker 0 prints a line of JSON."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch

import hvd_order.torch as hvd
from benchmarks.runner.workloads.emulated_device import EmulatedModel, model_input
from benchmarks.runner.workloads.profiles import PROFILES
from benchmarks.servers.server_load import slices_of_servers
from hvd_order.engine import engine_host


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
    """Trains a model whose layers sleep."""
    profile = PROFILES[job["model"]]()
    profile = profile.scaled_to(job["compute_s"])
    if shrink := job.get("shrink"):
        layers = [replace(layer, tensors=tuple(max(1, n // shrink) for n in layer.tensors))
                  for layer in profile.layers]  # fmt: skip
        profile = replace(profile, layers=tuple(layers))
    model = EmulatedModel(profile, hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    seconds = []
    owned_slices = []
    begin = time.monotonic()
    for _ in range(job["steps"]):
        optimizer.zero_grad()
        model(model_input()).backward()
        optimizer.step()
        now = time.monotonic()
        seconds.append(now - begin)
        owned_slices.append(slices_of_servers())
        begin = time.monotonic()
    optimizer.flush()
    host = engine_host.running_host()
    assert host is not None
    weights = [float(p.detach().double().sum()) for p in model.parameters()]
    same = all(
        torch.equal(weights, each)
        for weights, each in [
            (torch.tensor(weights), torch.tensor(w)) for w in hvd.allgather_object(weights)
        ]
    )
    return {
        "seconds": seconds,
        "owned_slices": owned_slices,
        "slice_settings": [host.slice_settings.slice_bytes, host.slice_settings.credit_bytes],
        "same": same,
        "weights": statistics.fmean(weights),
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    answer = {"raw": raw, "steps": steps}[job["what"]](job)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    answer["cpu_s"] = usage.ru_utime + usage.ru_stime
    if hvd.rank() == 0:
        print(json.dumps(answer), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
