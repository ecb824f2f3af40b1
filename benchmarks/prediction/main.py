"""Does the profile of one worker tell the throughput of several? See README.md."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "side_by_side"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parameter_server"))
from cells import rate, row, show, summary_of
from common.environment import describe, environment
from common.record import add_out_option, settings_of, write_record
from hosts import EmulatedHosts, why_not
from model import SLICE_BYTES, layers_of, step_of
from placed_job import PlacedJob
from profiles import PROFILES, Profile

from hvd_order.predict.workers.closed_forms import mean_value_analysis, upper_bound
from hvd_order.predict.workers.fit import fit_optimus_async, fit_optimus_sync
from hvd_order.predict.workers.throughput import Cluster, predict_servers
from hvd_order.predict.workers.transmission import POLICIES

_LINK_BYTES = 32_000_000
_LINK_IN_FLIGHT = 4
_LATENCY_S = 100e-6
_WARM_UP = 4  # steps in which servers sum, and the order is learnt
_COMPUTE = 3.0  # computation of a step over one worker's transfer, one way
_JOB = Path(__file__).with_name("job.py")


def main() -> int:
    options = _options()
    if reason := why_not():
        print(f"emulated hosts do not work here: {reason}", file=sys.stderr)
        return 2
    found = environment()
    print(describe(found) + "\n", flush=True)
    options.update_s_per_byte = _update_s_per_byte()
    cells: list[dict[str, Any]] = []
    for name in options.models:
        for rate_mbit in options.rates_mbit:
            for mode in options.modes:
                cells += _cells(name, rate_mbit, mode, options)
    summary = summary_of(cells)
    show(cells, summary)
    write_record("prediction", found, settings_of(options), {"cells": cells}, summary, options.out)
    return 0


def _cells(
    name: str, rate_mbit: float, mode: Literal["async", "sync"], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One worker measured and profiled, the others predicted and measured."""
    link = _measured_rate(rate_mbit)
    size = PROFILES[name]().size_bytes / options.shrink
    profile = layers_of(name, options.shrink, _COMPUTE * size / link)
    measured: dict[int, float] = {}
    ends: dict[int, list[list[float]]] = {}
    alone = _run_alone(_job(profile, name, options))
    step = step_of(profile, alone["events"][_WARM_UP:])
    for workers in options.workers:
        answer = _run(_job(profile, name, options), rate_mbit, mode, workers)
        ends[workers] = answer["ends"]
        measured[workers] = rate(answer["ends"], _WARM_UP)
    way = replace(POLICIES["ordered"], latency_s=_LATENCY_S)
    cluster = Cluster(link, pull=way, push=way, update_s_per_byte=options.update_s_per_byte)
    think_s = statistics.fmean(step.compute_s)
    stations = [sum(step.tensor_bytes) / link] * 2
    few = sorted(measured)[:2]
    cells = []
    for workers, steps_per_s in measured.items():
        predicted = predict_servers(step, cluster, workers, 1, mode)
        if mode == "async":
            optimus = fit_optimus_async([(w, 1, measured[w]) for w in few]).steps_per_s(workers, 1)
        else:
            sync = fit_optimus_sync([(w, 1, w, measured[w] / w) for w in few])
            optimus = workers * sync.steps_per_s(workers, 1, workers)
        cells.append({
            "model": name, "rate_mbit": rate_mbit, "mode": mode, "workers": workers,
            "measured": steps_per_s, "predicted": predicted.steps_per_s,
            "interval": [predicted.low, predicted.high],
            "error": predicted.steps_per_s / steps_per_s - 1,
            "mean_value": mean_value_analysis(think_s, stations, workers)[-1]
            if mode == "async" else None,
            "bound": upper_bound(think_s, stations, workers),
            "optimus": None if workers in few else optimus,
            "update_s_per_byte": cluster.update_s_per_byte,
            "compute_s": think_s,
            "link_bytes_per_s": link,
            "ends": ends[workers],
        })  # fmt: skip
        print(" ".join(row(cells[-1])), flush=True)
    return cells


def _job(profile: Profile, name: str, options: argparse.Namespace) -> dict[str, Any]:
    compute_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    return {"model": name, "shrink": options.shrink, "compute_s": compute_s,
            "steps": options.steps + _WARM_UP}  # fmt: skip


def _run_alone(job: dict[str, Any]) -> dict[str, Any]:
    """One worker without servers: its computations are the profile."""
    done = subprocess.run([sys.executable, str(_JOB), json.dumps(job)], check=True, text=True,
                          stdout=subprocess.PIPE, timeout=600)  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(line)
    return answer


def _run(job: dict[str, Any], rate_mbit: float, mode: str, workers: int) -> dict[str, Any]:
    knobs = {
        "HVD_ORDER_PS_UPDATE": "server", "HVD_ORDER_PS_MODE": mode, "HVD_ORDER_PS_BALANCE": "0",
        "HVD_ORDER_SLICE_BYTES": str(SLICE_BYTES), "HVD_ORDER_CREDIT_BYTES": "2MiB",
    }  # fmt: skip
    with EmulatedHosts(count=workers + 1, rate_mbit=rate_mbit) as hosts:
        return PlacedJob(hosts, workers, 1, _JOB).run(job, knobs)


@functools.cache
def _measured_rate(rate_mbit: float) -> float:
    """Bytes/s of a server's link, each way at once, with slices as they travel in training."""
    job = {"what": "raw", "bytes": _LINK_BYTES, "piece_bytes": SLICE_BYTES,
           "in_flight": _LINK_IN_FLIGHT, "repeats": 5}  # fmt: skip
    with EmulatedHosts(count=3, rate_mbit=rate_mbit) as hosts:
        seconds = PlacedJob(hosts, 2, 1).run(job, {})["seconds"]
    return 2 * _LINK_BYTES / statistics.median(seconds)


def _update_s_per_byte() -> float:
    """Seconds of SGD for each byte of a gradient, on this machine, as a server updates."""
    import torch

    torch.set_num_threads(1)
    count = SLICE_BYTES // 4
    parameters, gradients = ([torch.ones(count) for _ in range(64)] for _ in range(2))
    taken = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        begin = time.perf_counter()
        parameter.add_(gradient, alpha=-1e-3)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) / SLICE_BYTES


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition(" See")[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=sorted(PROFILES),
                        default=["resnet50", "densenet121", "gpt2_small"])  # fmt: skip
    parser.add_argument("--rates-mbit", nargs="+", type=float, default=[1000.0, 500.0])
    parser.add_argument("--modes", nargs="+", choices=["async", "sync"], default=["async", "sync"])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--shrink", type=int, default=8, help="a model has 1/N of its parameters")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each worker")
    add_out_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
