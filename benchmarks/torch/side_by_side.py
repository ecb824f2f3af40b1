"""How does hvd_order compare with its peers where the network is slow? See README.md."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.hosts import EmulatedHosts, why_not
from benchmarks.runner.cells.bounds import ClipBounds
from benchmarks.runner.cells.cell import (
    DDP_BUCKETS_MIB,
    CellResult,
    Contestant,
    MemoryIsShort,
    Setting,
    run_cell,
)
from benchmarks.runner.cells.pictures import draw_bars, draw_steps
from benchmarks.runner.fleet import Fleet, RankFailed
from benchmarks.runner.places import Place, emulated_hosts
from benchmarks.runner.records.environment import ROOT, commit_of, started
from benchmarks.runner.records.record import (
    DEFAULT_FOLDER,
    add_out_option,
    settings_of,
    write_record,
)
from benchmarks.runner.workloads.build import MODELS, is_real

SYSTEMS = {
    "torch": ["no_waiting", "no_waiting_halves", "ddp", "ddp_tuned", "fsdp2", "horovod",
              "hvd_order", "hvd_order_planned", "hvd_order_on_horovod"],
    "tensorflow": ["mirrored", "horovod", "hvd_order"],
}  # fmt: skip
PEERS = {
    "torch": ["ddp", "ddp_tuned", "horovod", "hvd_order"],
    "tensorflow": ["mirrored", "horovod", "hvd_order"],
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    reason = why_not()
    if reason:
        print(f"emulated hosts do not work here: {reason}", file=sys.stderr)
        return 2
    found = started()
    cells: list[CellResult] = []
    failed = []
    settings = [
        Setting(
            model, hosts, rate, ratio, options.rounds, options.steps, options.late, options.clip
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
    if cells:
        _write(found, cells, options)
    for cell in cells:
        if not cell.same_weights:
            failed.append(f"{cell.setting}: the systems ended with different weights")
    for line in failed:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if failed else 0


def _run_group(
    count: int, rate_mbit: float, settings: list[Setting], options: argparse.Namespace
) -> Iterator[CellResult]:
    """All cells that share their hosts; yields each as it is done."""
    with emulated_hosts(count, rate_mbit) as place, contextlib.ExitStack() as stack:
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

    def ours(name: str, more: Mapping[str, str] | None = None, tree: Path = ROOT) -> Contestant:
        # Knobs are read once a process, so each has ranks of its own.
        fleet = place.fleet(tree=tree)
        return Contestant(name, "hvd_order", fleet, {"env": {**knobs, **(more or {})}})

    contestants = []
    for name in options.systems:
        if name == "horovod":
            contestants.append(Contestant(name, name, place.horovod_fleet("horovod", {})))
        elif name == "hvd_order":
            contestants.append(ours(name))
        elif name == "no_waiting_halves":
            contestants.append(Contestant(name, name, place.fleet()))
        elif name == "hvd_order_on_horovod":
            contestants.append(ours(name, {"HVD_ORDER_TRANSPORT": "horovod"}))
        elif name == "hvd_order_planned":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd_order_plan_"))
            contestants.append(ours(name, {"HVD_ORDER_PLAN": str(Path(folder) / "plan.json")}))
        else:
            contestants.append(Contestant(name, name.removesuffix("_tuned"), torch_fleet,
                                          buckets_mib=options.buckets_mib))  # fmt: skip
    if options.before:
        contestants.append(ours("before", tree=options.before.resolve()))
    for point in options.sweep:
        slice_bytes, _, credit_bytes = point.partition("/")
        sizes = {"HVD_ORDER_SLICE_BYTES": slice_bytes, "HVD_ORDER_CREDIT_BYTES": credit_bytes}
        contestants.append(ours(point, sizes))
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


def _write(found: dict[str, Any], cells: list[CellResult], options: argparse.Namespace) -> None:
    name = options.name
    settings = settings_of(options)
    if options.before:
        settings["before"] = commit_of(options.before)[0]
    write_record(
        "side_by_side", found, settings, {"cells": [cell.to_json() for cell in cells]},
        {"cells": [cell.summary() for cell in cells]},
        options.out or DEFAULT_FOLDER / f"{name}.json",
    )  # fmt: skip
    folder = DEFAULT_FOLDER
    draw_bars(_bars(cells), "step time / optimum", folder / f"{name}_bars.png")
    draw_steps(cells[0], folder / f"{name}_step.png")
    print(f"pictures: out/results/{name}_*.png")


def _bars(cells: list[CellResult]) -> dict[str, dict[str, float]]:
    """Step time over optimum, by cell and system."""
    return {
        f"{c.setting.label}\n{c.setting.hosts} x {c.setting.rate_mbit:g} Mbit/s\n"
        f"ratio {c.ratio:.3g}": {
            name: one.step_s / c.optimum_s for name, one in c.systems.items() if name != "local"
        }
        for c in cells
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hvd-order bench", description=__doc__.partition(" See")[0] if __doc__ else None
    )
    parser.add_argument("--quick", action="store_true",
                        help="two small cells: shows that all works, not how fast")  # fmt: skip
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet50"])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2])
    parser.add_argument("--rate-mbit", nargs="+", type=float, default=[1000.0])
    parser.add_argument("--ratio", nargs="+", type=float, default=[1.0],
                        help="computation over communication, of emulated models")  # fmt: skip
    parser.add_argument("--late", type=float, default=1.0, metavar="FACTOR",
                        help="the last host computes for so many times as long")  # fmt: skip
    parser.add_argument("--clip", nargs="?", type=float, const=1.0, metavar="NORM",
                        help="every system clips all gradients to this global norm in every step; "
                        "1 if none is named")  # fmt: skip
    parser.add_argument("--framework", choices=list(SYSTEMS), default="torch")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM",
                        help="; ".join(f"{framework}: {', '.join(names)}"
                                       for framework, names in SYSTEMS.items()))  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system")
    parser.add_argument("--steps", type=int, default=5, help="measured steps in each turn")
    parser.add_argument("--buckets-mib", nargs="+", type=float, default=list(DDP_BUCKETS_MIB),
                        metavar="MIB", help="of which tuned DDP takes the best")  # fmt: skip
    parser.add_argument("--env", nargs="+", default=[], metavar="NAME=VALUE",
                        help="knobs of hvd_order")  # fmt: skip
    parser.add_argument("--sweep", nargs="+", default=[], metavar="SLICE/CREDIT",
                        help="hvd_order with these sizes as well, say 1MiB/2MiB")  # fmt: skip
    parser.add_argument("--before", type=Path, metavar="TREE",
                        help="hvd_order of another built checkout as well")  # fmt: skip
    parser.add_argument("--name", default="side_by_side", help="of the files in out/results")
    add_out_option(parser)
    options = parser.parse_args(argv)
    known = SYSTEMS[options.framework]
    options.systems = options.systems or list(PEERS[options.framework])
    for name in options.systems:
        if name not in known:
            parser.error(f"{options.framework} has no system {name!r}: {', '.join(known)}")
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
    if options.quick:
        options.models, options.rounds, options.steps = ["resnet50", "densenet121"], 1, 3
        options.systems = ["ddp", "hvd_order"]
    if "horovod" in options.systems and not _has_horovod(options.framework):
        print(f"Horovod for {options.framework} is not installed and left out; 'make horovod' "
              "builds it", file=sys.stderr)  # fmt: skip
        options.systems.remove("horovod")
    return options


def _has_horovod(framework: str) -> bool:
    found = find_spec("horovod")
    if found is None or found.origin is None:
        return False
    return any((Path(found.origin).parent / framework).glob("mpi_lib*.so"))


if __name__ == "__main__":
    sys.exit(main())
