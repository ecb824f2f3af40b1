"""How does hvd_order compare with its peers where the network is slow? See README.md."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.hosts import EmulatedHosts
from benchmarks.runner.cells.bounds import ClipBounds
from benchmarks.runner.cells.cell import CellResult, MemoryIsShort, Setting, run_cell
from benchmarks.runner.cells.contestant import DDP_BUCKETS_MIB, VARIANTS, Contestant
from benchmarks.runner.cells.pictures import draw_bars, draw_steps
from benchmarks.runner.fleet import Fleet, RankFailed
from benchmarks.runner.places import Place, emulated_hosts
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.records.environment import commit_of
from benchmarks.runner.records.record import DEFAULT_FOLDER
from benchmarks.runner.workloads.build import MODELS, is_real

SYSTEMS = {
    "torch": ["no_waiting", "no_waiting_halves", "ddp", "ddp_tuned", "ddp_bf16", "ddp_powersgd",
              "ddp_powersgd4", "fsdp2", "horovod", "hvd_order_planned", "int8", "auto", *VARIANTS],
    "tensorflow": ["mirrored", "horovod", "hvd_order"],
}  # fmt: skip
PEERS = {
    "torch": ["ddp", "ddp_tuned", "horovod", "hvd_order"],
    "tensorflow": ["mirrored", "horovod", "hvd_order"],
}


def measure(options: argparse.Namespace) -> Answer:
    cells: list[CellResult] = []
    failed = []
    settings = [
        Setting(
            model,
            hosts,
            rate,
            ratio,
            options.rounds,
            options.steps,
            options.late,
            options.clip,
            options.ranks_per_host,
        )
        for hosts, rate, model in itertools.product(
            options.hosts, options.rate_mbit, options.models
        )
        for ratio in ([None] if is_real(model) else options.ratio)
    ]
    for (hosts, rate), group in itertools.groupby(settings, key=lambda s: (s.hosts, s.rate_mbit)):
        try:
            for cell in _run_group(hosts, rate, list(group), options):
                cells.append(cell)
                print(f"{cell.setting.label}: measured", file=sys.stderr, flush=True)
                if cell.clip_bounds is not None:
                    print(_clip_line(cell, cell.clip_bounds), flush=True)
        except (RankFailed, MemoryIsShort) as error:
            print(f"\n{error}", file=sys.stderr)
            failed.append(str(error))
    if not cells:
        raise RankFailed("; ".join(failed))
    draw_bars(_bars(cells), "step time / optimum", DEFAULT_FOLDER / f"{options.name}_bars.png")
    draw_steps(cells[0], DEFAULT_FOLDER / f"{options.name}_step.png")
    print(f"pictures: out/results/{options.name}_*.png")
    failed += [f"{cell.setting}: the systems ended with different weights"
               for cell in cells if not cell.same_weights]  # fmt: skip
    return Answer(
        {"cells": [cell.to_json() for cell in cells]},
        {"cells": [cell.summary() for cell in cells]},
        {"before": commit_of(options.before)[0]} if options.before else {},
        "; ".join(failed),
        options.name,
    )


def _run_group(
    count: int, rate_mbit: float, settings: list[Setting], options: argparse.Namespace
) -> Iterator[CellResult]:
    """All cells that share their hosts; yields each as it is done."""
    with (
        emulated_hosts(count, rate_mbit, each=options.ranks_per_host) as place,
        contextlib.ExitStack() as stack,
    ):
        torch_fleet = place.fleet(restless=False)
        local_fleet = torch_fleet
        if options.framework == "tensorflow":
            contestants = _tensorflow(place, options)
            local_fleet = next(c.fleet for c in contestants if c.name == "hvd_order")
        else:
            contestants = _torch(place, options, stack, torch_fleet)
        for setting in settings:

            def tell(text: str, setting: Setting = setting) -> None:
                where = f"{setting.model}, {count} hosts, {rate_mbit:g} Mbit/s"
                if setting.ratio:
                    where += f", ratio {setting.ratio:g}"
                if sys.stderr.isatty():
                    print(f"\r\x1b[K{where}: {text}", end="", file=sys.stderr, flush=True)

            yield run_cell(torch_fleet, contestants, setting, tell, local_fleet)
            if sys.stderr.isatty():
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _torch(
    place: Place, options: argparse.Namespace, stack: contextlib.ExitStack, torch_fleet: Fleet
) -> list[Contestant]:
    """PyTorch's systems that were asked for, with their ranks."""
    knobs = dict(pair.split("=", 1) for pair in options.env)
    contestants = []
    for name in options.systems:
        if name == "horovod":
            contestants.append(Contestant(name, name, place.horovod_fleet("horovod", {})))
        elif name in VARIANTS:
            contestants.append(Contestant.variant(name, place, knobs, options.before))
        elif name in ("int8", "auto"):
            contestants.append(Contestant(name, name, place.fleet(), {"env": knobs}))
        elif name == "no_waiting_halves":
            contestants.append(Contestant(name, name, place.fleet()))
        elif name == "hvd_order_planned":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd_order_plan_"))
            plan = {"HVD_ORDER_PLAN": str(Path(folder) / "plan.json")}
            contestants.append(Contestant.variant(name, place, {**knobs, **plan}))
        else:
            contestants.append(Contestant(name, name.removesuffix("_tuned"), torch_fleet,
                                          buckets_mib=options.buckets_mib))  # fmt: skip
    for point in options.sweep:
        slice_bytes, _, credit_bytes = point.partition("/")
        sizes = {"HVD_ORDER_SLICE_BYTES": slice_bytes, "HVD_ORDER_CREDIT_BYTES": credit_bytes}
        contestants.append(Contestant.variant(point, place, {**knobs, **sizes}))
    return contestants


def _tensorflow(place: Place, options: argparse.Namespace) -> list[Contestant]:
    """TensorFlow's systems that were asked for, with their ranks."""
    assert isinstance(place.hosts, EmulatedHosts)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    workers = [f"{address}:12345" for address in place.hosts.addresses]
    contestants = []
    for name in options.systems:
        knobs: dict[str, Any] = {}
        if name == "horovod":
            fleet = place.horovod_fleet("tensorflow_horovod", quiet)
        elif name == "mirrored":
            fleet = place.fleet("tensorflow_mirrored", restless=False, extra=[
                {
                    **quiet,
                    "TF_CONFIG": json.dumps({
                        "cluster": {"worker": workers}, "task": {"type": "worker", "index": rank},
                    }),
                }
                for rank in range(len(workers))
            ])  # fmt: skip
        else:
            knobs = {"env": dict(pair.split("=", 1) for pair in options.env)}
            extra = [quiet] * len(workers)
            fleet = place.fleet("tensorflow_hvd_order", restless=False, extra=extra)
        contestants.append(Contestant(name, name, fleet, knobs))
    return contestants


def _clip_line(cell: CellResult, bounds: ClipBounds) -> str:
    """What the norm leaves of the overlap: the bounds, and how far the systems follow them."""
    gain = cell.optimum_s / bounds.unsplit_s
    text = (
        f"{cell.setting.label} at norm {cell.setting.clip:g}: optimum {cell.optimum_s:.3f} s; with "
        f"no all-gather before the norm {bounds.late_gathers_s:.3f} s; with whole all-reduces "
        f"{bounds.unsplit_s:.3f} s; optimum / whole {gain:.3f}"
    )
    if {"hvd_order", "ddp_tuned"} <= cell.systems.keys():
        ratio = cell.against("hvd_order", "ddp_tuned")
        text += f"; hvd_order / ddp_tuned {ratio}, that over it {ratio.median / gain:.3f}"
    return text


def _bars(cells: list[CellResult]) -> dict[str, dict[str, float]]:
    """Step time over optimum, by cell and system."""
    return {
        f"{c.setting.label}\n{c.setting.hosts} x {c.setting.rate_mbit:g} Mbit/s\n"
        f"ratio {c.ratio:.3g}": {
            name: one.step_s / c.optimum_s for name, one in c.systems.items() if name != "local"
        }
        for c in cells
    }


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    known = SYSTEMS[options.framework]
    options.systems = options.systems or list(PEERS[options.framework])
    for name in options.systems:
        if name not in known:
            parser.error(f"{options.framework} has no system {name!r}: {', '.join(known)}")
    if options.ranks_per_host < 1:
        parser.error(f"--ranks-per-host {options.ranks_per_host}: at least 1 is needed")
    if options.ranks_per_host > 1 and (
        options.framework == "tensorflow" or "horovod" in options.systems
    ):
        parser.error("--ranks-per-host goes with PyTorch's systems")
    if options.late <= 0:
        parser.error(f"--late {options.late:g}: a factor above 0 is needed")
    if options.late != 1 and any(is_real(model) for model in options.models):
        parser.error("--late goes with emulated models: real ones take the time they take")
    if options.clip is not None and not options.clip > 0:
        parser.error(f"--clip {options.clip:g}: a norm above 0 is needed")
    if options.framework == "tensorflow":
        if options.clip is not None:
            parser.error("--clip goes with --framework torch")
        if find_spec("tensorflow") is None:
            parser.error("TensorFlow is not installed: pip install -r requirements/tensorflow.txt")
        if "hvd_order" not in options.systems:
            parser.error("hvd_order's ranks make the local steps; name it among --systems")
        if options.sweep or any(is_real(model) for model in options.models):
            parser.error("with --framework tensorflow: no --sweep, and emulated models alone")
    if options.before and "before" not in options.systems:
        options.systems.append("before")
    if "before" in options.systems and not options.before:
        parser.error("'before' needs --before TREE")
    if "horovod" in options.systems and not _has_horovod(options.framework):
        print(f"Horovod for {options.framework} is not installed and left out; 'make horovod' "
              "builds it", file=sys.stderr)  # fmt: skip
        options.systems.remove("horovod")


def _has_horovod(framework: str) -> bool:
    found = find_spec("horovod")
    if found is None or found.origin is None:
        return False
    return any((Path(found.origin).parent / framework).glob("mpi_lib*.so"))


def main(argv: Sequence[str] | None = None) -> int:
    return ask(
        "side_by_side", __doc__, measure,
        option("--models", ["resnet50"], choices=MODELS),
        option("--hosts", [2]),
        option("--ranks-per-host", 1, "ranks that share a host's link"),
        option("--rate-mbit", [1000.0]),
        option("--ratio", [1.0], "computation over communication, of emulated models"),
        option("--late", 1.0, "the last host computes for so many times as long",
               metavar="FACTOR"),
        option("--clip", None, "every system clips all gradients to this global norm in every "
               "step; 1 if none is named", type=float, nargs="?", const=1.0, metavar="NORM"),
        option("--framework", "torch", choices=list(SYSTEMS)),
        option("--systems", None, "; ".join(f"{framework}: {', '.join(names)}"
                                            for framework, names in SYSTEMS.items()),
               nargs="+", metavar="SYSTEM"),
        option("--rounds", 3, "turns of each system"),
        option("--steps", 5, "measured steps in each turn"),
        option("--buckets-mib", list(DDP_BUCKETS_MIB), "of which tuned DDP takes the best",
               metavar="MIB"),
        option("--env", [], "knobs of hvd_order", metavar="NAME=VALUE"),
        option("--sweep", [], "hvd_order with these sizes as well, say 1MiB/2MiB",
               metavar="SLICE/CREDIT"),
        option("--before", None, "hvd_order of another built checkout as well", type=Path,
               metavar="TREE"),
        option("--name", "side_by_side", "of the files in out/results"),
        check=_check, on_hosts=True, prog="hvd-order bench", argv=argv,
        quick={"models": ["resnet50", "densenet121"], "rounds": 1, "steps": 3,
               "systems": ["ddp", "hvd_order"]},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
