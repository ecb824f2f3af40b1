"""What does a copy of every slice cost, and what does a bound gain that lets the copy lag?"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.hosts import EmulatedHosts
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import turns
from benchmarks.servers.placed_job import PlacedJob

_WORKERS, _SERVERS = 2, 2
_COPIES = {"HVD_ORDER_PS_REPLICAS": "1"}
_SYSTEMS: dict[str, dict[str, str]] = {
    "no copies": {},
    "bound 0": _COPIES,
    "bound 0.01": {**_COPIES, "HVD_ORDER_PS_DIVERGENCE": "0.01"},
    "bound 1e9": {**_COPIES, "HVD_ORDER_PS_DIVERGENCE": "1e9"},
}
_UNMEASURED = 4  # steps at first: the model is learnt, and copies are made


def divergence(options: argparse.Namespace) -> dict[str, Any]:
    """Steps and bytes of a model that moves nothing else, with and without copies."""
    seconds: dict[str, list[float]] = {name: [] for name in _SYSTEMS}
    sent: dict[str, list[float]] = {name: [] for name in _SYSTEMS}
    steps = options.steps + _UNMEASURED
    job = {"what": "steps", "model": "densenet121", "compute_s": 0.05, "steps": steps}
    knobs = {
        "HVD_ORDER_SLICE_BYTES": "512KiB",
        "HVD_ORDER_PS_UPDATE": "server",
        "HVD_ORDER_PS_BALANCE": "0",
    }
    with EmulatedHosts(count=_WORKERS + _SERVERS, rate_mbit=options.rate_mbit) as hosts:
        placed = PlacedJob(hosts, _WORKERS, _SERVERS)
        servers = [placed.server_host(server) for server in range(_SERVERS)]
        for _, name in turns(list(_SYSTEMS), options.rounds):
            before = sum(hosts.sent_bytes(host) for host in servers)
            answer = placed.run(job, {**knobs, **_SYSTEMS[name]})
            assert answer["same"], "the workers' weights differ"
            seconds[name] += answer["seconds"][_UNMEASURED:]
            sent[name].append((sum(hosts.sent_bytes(host) for host in servers) - before) / steps)
    for name, values in seconds.items():
        ratio = paired_ratio(values, seconds["bound 0"])
        print(
            f"divergence, {name}: step {statistics.median(values):.3f} s "
            f"({min(values):.3f}-{max(values):.3f}), {ratio} of that with bound 0; the servers "
            f"send {statistics.median(sent[name]) / 1e6:.1f} MB a step"
        )
    ratios = {
        name: paired_ratio(values, seconds["bound 0"]).to_json() for name, values in seconds.items()
    }
    return {"raw": {"seconds": seconds, "sent": sent}, "summary": {"over_bound_0": ratios}}
