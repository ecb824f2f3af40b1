"""How much of the link's throughput is left under the engine? See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import hvd_order.torch as hvd
from benchmarks.runner.ranks import (
    WORKER_OPTION,
    new_host,
    run_as_rank,
    run_ranks,
    seconds_of,
    slowest,
)
from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from benchmarks.runner.records.report import table
from benchmarks.runner.records.summary import Summary, paired_ratio
from benchmarks.runner.turns import take_turns
from hvd_order._native import _torch as native
from hvd_order.engine.engine_host import EngineHost
from hvd_order.engine.job import process

MIB = 2**20
MODEL = 0  # the one model of each engine
AGREEMENTS = ("leader", "negotiated", "planned")
RIVALS = ("plain window", "plain at once")
TARGET = 0.95
DEFAULT_SLICE_MIB = 2.0


def main() -> None:
    options = _options()
    if options.worker:
        run_as_rank(lambda device: measure(options, device), options.worker, options.device)
        return
    found = started()
    results = run_ranks(options.ranks, sys.argv[1:])
    summary = show(options, results)
    write_record("throughput", found, settings_of(options), {"results": results},
                 {"results": summary}, options.out)  # fmt: skip
    if not all(result["sums_right"] for result in results):
        raise SystemExit("FAIL: wrong sums")


# ---- in every rank ------------------------------------------------------------------------------


def measure(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """One entry for each slice size, with seconds by variant."""
    credit_bytes = int(options.credit_mib * MIB)
    total_bytes = int(options.total_mib * MIB)
    group = process.current().new_group("plain")
    hosts = {
        # A credit below the slice is raised to it, as the optimizers' engine does.
        kind: new_host(agreement=kind, credit_bytes=credit_bytes, slice_bytes=credit_bytes)
        for kind in options.agreements
    }
    buffer = torch.empty(total_bytes // 4, device=device)
    check = Check(buffer)
    results = []
    for slice_mib in options.slice_mib:
        slice_bytes = int(slice_mib * MIB)
        count = total_bytes // slice_bytes
        views = list(buffer.split(slice_bytes // 4))
        window = max(1, credit_bytes // slice_bytes)
        variants: dict[str, Callable[[], None]] = {
            "plain window": lambda views=views, window=window: plain(views, window, group),
            "plain at once": lambda views=views: plain(views, len(views), group),
        }
        for kind, host in hosts.items():
            layout = native.SliceLayout(
                [(f"t{i}", slice_bytes, 0) for i in range(count)], slice_bytes
            )
            assert len(layout.slices) == count
            plan = list(range(count)) if kind == "planned" else []
            host.add_model(MODEL, layout, [buffer], plan)
            variants[kind] = lambda host=host, views=views: ours(host, views)
        seconds = take_turns(
            {
                name: lambda work=work: check.around(lambda: seconds_of(work, device))
                for name, work in variants.items()
            },
            options.rounds,
            options.warm_up,
        )
        results.append(
            {
                "ranks": hvd.size(),
                "device": str(device),
                "backend": process.current().backend,
                "slice_mib": slice_mib,
                "bytes": total_bytes,
                "slices": count,
                "window": window,
                "seconds": {name: slowest(values) for name, values in seconds.items()},
                "sums_right": check.right_everywhere(),
            }
        )
        for host in hosts.values():
            host.remove_model(MODEL)
        hvd.barrier()  # nobody adds the next model before all have removed this one
    return results


def plain(views: Sequence[torch.Tensor], window: int, group: dist.ProcessGroup) -> None:
    """c10d alone, with at most ``window`` slices in flight."""
    works: deque[Any] = deque()
    for view in views:
        if len(works) >= window:
            works.popleft().wait()
        works.append(dist.all_reduce(view, group=group, async_op=True))
    for work in works:
        work.wait()


def ours(host: EngineHost, views: Sequence[torch.Tensor]) -> None:
    """The same slices through the engine, one tensor a slice."""
    for tensor, view in enumerate(views):
        native.mark_ready_when_computed(host.engine, host.transport, MODEL, tensor, view)
    for tensor in range(len(views)):
        host.engine.wait(MODEL, tensor)


class Check:
    """Whether every all-reduce gave the sum, to the bit."""

    def __init__(self, buffer: torch.Tensor) -> None:
        size = hvd.size()
        self._buffer = buffer
        self._pattern = torch.arange(buffer.numel(), device=buffer.device).remainder_(1021).float()
        self._mine = self._pattern * (hvd.rank() + 1)
        self._sum = self._pattern * (size * (size + 1) // 2)
        self._right = True

    def around(self, work: Callable[[], float]) -> float:
        self._buffer.copy_(self._mine)
        answer = work()
        self._right &= torch.equal(self._buffer, self._sum)
        return answer

    def right_everywhere(self) -> bool:
        return bool(hvd.allreduce(torch.tensor(float(self._right)), op=hvd.Min))


# ---- in the process that was started ------------------------------------------------------------


def show(options: argparse.Namespace, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints the tables; returns a summary for each slice size."""
    first = results[0]
    names = list(first["seconds"])
    print(
        f"\n{first['ranks']} ranks, {first['device'].split(':')[0]}, {first['backend']}, "
        f"{first['bytes'] / MIB:g} MiB, credit {options.credit_mib:g} MiB; "
        f"{options.rounds} rounds after {options.warm_up} of warm-up\n"
        "algbw in GB/s, median (busbw = algbw x "
        f"{2 * (first['ranks'] - 1) / first['ranks']:g}); ratio of throughputs "
        "to the better plain one [95 %]\n"
    )
    kinds = [name for name in names if name not in RIVALS]
    rows = []
    lowest: dict[str, float] = {}
    summaries = []
    for result in results:
        seconds = result["seconds"]
        better = min(RIVALS, key=lambda name: statistics.median(seconds[name]))
        ratios = {kind: paired_ratio(seconds[better], seconds[kind]) for kind in kinds}
        summaries.append({
            "slice_mib": result["slice_mib"],
            "better_plain": better,
            "seconds": {name: Summary.of(values).to_json() for name, values in seconds.items()},
            "ratio": {
                kind: {r: paired_ratio(seconds[r], seconds[kind]).to_json() for r in RIVALS}
                for kind in kinds
            },
        })  # fmt: skip
        for kind, ratio in ratios.items():
            if result["slice_mib"] >= DEFAULT_SLICE_MIB:
                lowest[kind] = min(lowest.get(kind, ratio.median), ratio.median)
        rows.append(
            [
                f"{result['slice_mib']:g}",
                result["window"],
                *(f"{result['bytes'] / statistics.median(seconds[n]) / 1e9:.2f}" for n in names),
                *ratios.values(),
                "right" if result["sums_right"] else "WRONG",
            ]
        )
    header = ["slice MiB", "in flight", *names, *(f"ratio {kind}" for kind in kinds), "sums"]
    print(table(header, rows) + "\n")
    for kind, ratio in lowest.items():
        print(
            f"{kind}: lowest ratio with slices of {DEFAULT_SLICE_MIB:g} MiB and more {ratio:.3f} "
            f"(target at least {TARGET}): {'met' if ratio >= TARGET else 'NOT MET'}"
        )
    return summaries


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--total-mib", type=float, default=64)
    parser.add_argument("--credit-mib", type=float, default=8)
    parser.add_argument(
        "--slice-mib", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    )
    parser.add_argument("--agreements", nargs="+", choices=AGREEMENTS, default=AGREEMENTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_out_option(parser)
    parser.add_argument(WORKER_OPTION, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for slice_mib in options.slice_mib:
        if options.total_mib % slice_mib:
            parser.error(f"slices of {slice_mib:g} MiB do not fill {options.total_mib:g} MiB")
    return options


if __name__ == "__main__":
    main()
