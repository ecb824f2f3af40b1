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
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.ranks import new_host, run_as_rank, run_ranks, seconds_of, slowest
from benchmarks.runner.records.report import table
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import take_turns
from hvd_order._native import _torch as native
from hvd_order.engine.engine_host import EngineHost
from hvd_order.engine.job import process

MIB = 2**20
MODEL = 0  # the one model of each engine
AGREEMENTS = ("leader", "negotiated", "planned")
PLAIN = ("plain window", "plain at once")


def measure(options: argparse.Namespace) -> Answer:
    results = run_ranks(options.ranks, sys.argv[1:])
    summaries, rows = [], []
    for result in results:
        seconds = result["seconds"]
        better = min(PLAIN, key=lambda name: statistics.median(seconds[name]))
        ratios = {
            kind: {name: paired_ratio(seconds[name], seconds[kind]) for name in PLAIN}
            for kind in options.agreements
        }
        summaries.append({
            "slice_mib": result["slice_mib"],
            "better_plain": better,
            "seconds": {name: statistics.median(each) for name, each in seconds.items()},
            "ratio": {
                kind: {name: ratio.to_json() for name, ratio in each.items()}
                for kind, each in ratios.items()
            },
        })  # fmt: skip
        rates = [f"{result['bytes'] / statistics.median(each) / 1e9:.2f}"
                 for each in seconds.values()]  # fmt: skip
        over = [ratios[kind][better] for kind in options.agreements]
        rows.append([f"{result['slice_mib']:g}", result["window"], *rates, *over])
    names = [*results[0]["seconds"], *(f"ratio {kind}" for kind in options.agreements)]
    print("algbw in GB/s, median; ratio of throughputs to the better plain one [95 %]\n")
    print(*table(["slice MiB", "in flight", *names], rows), sep="\n")
    wrong = "" if all(result["sums_right"] for result in results) else "wrong sums"
    return Answer({"results": results}, {"results": summaries}, failed=wrong)


def in_rank(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
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
            variants,
            lambda name, of=variants: [check.around(lambda: seconds_of(of[name], device))],
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


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for slice_mib in options.slice_mib:
        if options.total_mib % slice_mib:
            parser.error(f"slices of {slice_mib:g} MiB do not fill {options.total_mib:g} MiB")


if __name__ == "__main__":
    sys.exit(ask(
        "throughput", __doc__, measure,
        option("--ranks", 2),
        option("--rounds", 25),
        option("--warm-up", 3),
        option("--total-mib", 64.0),
        option("--credit-mib", 8.0),
        option("--slice-mib", [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]),
        option("--agreements", list(AGREEMENTS), choices=AGREEMENTS),
        option("--device", "cpu", choices=("cpu", "cuda")),
        check=_check, quick={"rounds": 2, "slice_mib": [1.0, 4.0]},
        rank=lambda options: run_as_rank(
            lambda device: in_rank(options, device), options.worker, options.device
        ),
    ))  # fmt: skip
