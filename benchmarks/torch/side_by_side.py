"""How does hvd_order compare with its peers where the network is slow? See README.md."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from benchmarks.hosts import EmulatedHosts, why_not
from benchmarks.runner.cell import (
    DDP_BUCKETS_MIB,
    CellResult,
    Contestant,
    MemoryIsShort,
    Setting,
    run_cell,
)
from benchmarks.runner.cell_bounds import ClipBounds
from benchmarks.runner.fleet import Fleet, RankFailed
from benchmarks.runner.horovod_workers import horovod_env
from benchmarks.runner.pictures import draw_bars, draw_efficiency, draw_steps
from benchmarks.runner.records.environment import ROOT, commit_of, describe, environment
from benchmarks.runner.records.record import (
    DEFAULT_FOLDER,
    add_out_option,
    settings_of,
    write_record,
)
from benchmarks.runner.records.report import table
from benchmarks.runner.workloads.workloads import MODELS, is_real

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
    found = environment()
    print(describe(found) + "\n", flush=True)
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
                print(_table([cell], header=len(cells) == 1), flush=True)
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
) -> Any:
    """All cells that share their hosts; yields each as it is done."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(EmulatedHosts(count=count, rate_mbit=rate_mbit))
        log = stack.enter_context(
            tempfile.NamedTemporaryFile(
                "w+", prefix="hvd_order_bench_", suffix=".log", delete=False
            )
        )

        def start(
            peer: str, env: Sequence[dict[str, str]], restless: bool = False, tree: Path = ROOT
        ) -> Fleet:
            fleet = Fleet(hosts, peer, log, env, restless, tree)
            stack.callback(fleet.close)
            return fleet

        ranks = [hosts.rank_environment(rank) for rank in range(count)]
        torch_fleet = start("torch", ranks)
        local_fleet = torch_fleet
        if options.framework == "tensorflow":
            contestants = _tensorflow(hosts, ranks, options, stack, start, log)
            local_fleet = next(c.fleet for c in contestants if c.name == "hvd_order")
        else:
            contestants = _torch(hosts, ranks, options, stack, start, log, torch_fleet)
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
    hosts: EmulatedHosts,
    ranks: list[dict[str, str]],
    options: argparse.Namespace,
    stack: contextlib.ExitStack,
    start: Callable[..., Fleet],
    log: TextIO,
    torch_fleet: Fleet,
) -> list[Contestant]:
    """PyTorch's systems that were asked for, with their ranks."""

    def another(port: int, tree: Path = ROOT) -> Fleet:
        own = str(int(ranks[0]["MASTER_PORT"]) + port)
        env = [{**env, "MASTER_PORT": own} for env in ranks]
        fleet = start("torch", env, restless=True, tree=tree)
        fleet.sleep()
        return fleet

    knobs = dict(pair.split("=", 1) for pair in options.env)
    contestants = []
    for name in options.systems:
        if name == "horovod":
            fleet = _horovod(hosts, "horovod", {}, stack, start, log)
            contestants.append(Contestant(name, name, fleet))
        elif name == "hvd_order":
            contestants.append(Contestant(name, name, another(300), {"env": knobs}))
        elif name == "no_waiting_halves":
            contestants.append(Contestant(name, name, another(500)))
        elif name == "hvd_order_on_horovod":
            env = {**knobs, "HVD_ORDER_TRANSPORT": "horovod"}
            contestants.append(Contestant(name, "hvd_order", another(100), {"env": env}))
        elif name == "hvd_order_planned":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd_order_plan_"))
            env = {**knobs, "HVD_ORDER_PLAN": str(Path(folder) / "plan.json")}
            contestants.append(Contestant(name, "hvd_order", another(200), {"env": env}))
        else:
            contestants.append(Contestant(name, name.removesuffix("_tuned"), torch_fleet,
                                          buckets_mib=options.buckets_mib))  # fmt: skip
    if options.before:
        fleet = another(400, options.before.resolve())
        contestants.append(Contestant("before", "hvd_order", fleet, {"env": knobs}))
    for i, point in enumerate(options.sweep, start=1):
        # Knobs are read once a process, so each point has ranks of its own.
        slice_bytes, _, credit_bytes = point.partition("/")
        sizes = {"HVD_ORDER_SLICE_BYTES": slice_bytes, "HVD_ORDER_CREDIT_BYTES": credit_bytes}
        contestants.append(Contestant(point, "hvd_order", another(i), {"env": {**knobs, **sizes}}))
    return contestants


def _tensorflow(
    hosts: EmulatedHosts,
    ranks: list[dict[str, str]],
    options: argparse.Namespace,
    stack: contextlib.ExitStack,
    start: Callable[..., Fleet],
    log: TextIO,
) -> list[Contestant]:
    """TensorFlow's systems that were asked for, with their ranks."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    own = {**quiet, "MASTER_PORT": str(int(ranks[0]["MASTER_PORT"]) + 300)}
    contestants = []
    for name in options.systems:
        if name == "horovod":
            fleet = _horovod(hosts, "tensorflow_horovod", quiet, stack, start, log)
            contestants.append(Contestant(name, name, fleet))
        elif name == "mirrored":
            workers = [f"{address}:12345" for address in hosts.addresses]
            fleet = start("tensorflow_mirrored", [
                {
                    **env, **quiet,
                    "TF_CONFIG": json.dumps({
                        "cluster": {"worker": workers}, "task": {"type": "worker", "index": rank},
                    }),
                }
                for rank, env in enumerate(ranks)
            ])  # fmt: skip
            contestants.append(Contestant(name, name, fleet))
        else:
            knobs = dict(pair.split("=", 1) for pair in options.env)
            fleet = start("tensorflow_hvd_order", [{**env, **own} for env in ranks])
            contestants.append(Contestant(name, name, fleet, {"env": knobs}))
    return contestants


def _horovod(
    hosts: EmulatedHosts,
    peer: str,
    extra: dict[str, str],
    stack: contextlib.ExitStack,
    start: Callable[..., Fleet],
    log: TextIO,
) -> Fleet:
    """Ranks of Horovod; they sleep."""
    port = int(stack.enter_context(_rendezvous(hosts, log)))
    count = len(hosts.names)
    fleet = start(peer, [
        {
            **horovod_env(hosts.addresses[0], port, rank, count, hosts.names[rank], "eth0"),
            "RANK": str(rank),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",  # it is stopped for long
            "GLOO_SOCKET_IFNAME": "eth0",  # whose bytes are counted
            **extra,
        }
        for rank in range(count)
    ], restless=True)  # fmt: skip
    fleet.sleep()
    return fleet


@contextlib.contextmanager
def _rendezvous(hosts: EmulatedHosts, log: TextIO) -> Iterator[str]:
    """Horovod's meeting point, on the first host; its port."""
    server = hosts.popen(
        0, [sys.executable, "-m", "hvd_order.launch.horovod_rendezvous",
            "--hosts", ",".join(f"{name}:1" for name in hosts.names)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    port = server.stdout.readline()
    if not port:
        raise RankFailed(f"Horovod's rendezvous did not start; see {log.name}")
    try:
        yield port
    finally:
        server.stdin.close()
        server.wait(30)


def _table(cells: list[CellResult], header: bool = True) -> str:
    names = list(dict.fromkeys(n for cell in cells for n in cell.systems if n != "local"))
    rows = []
    for cell in cells:
        s = cell.setting
        rows += [[
            s.label, s.hosts, f"{s.rate_mbit:g}", f"{cell.ratio:.3g}",
            f"{cell.wire_s:.3f}", f"{cell.local_s:.3f}", f"{cell.optimum_s:.3f}",
            name + (f" ({m.note})" if m.note else ""),
            f"{m.step_s:.3f}", f"{min(m.seconds):.3f}-{max(m.seconds):.3f}",
            f"{m.step_s / cell.optimum_s:.3f}",
            f"{cell.overlap(name).efficiency:.2f}",
            f"{100 * cell.utilisation(name):.0f}",
            f"{sum(m.cpu_s) / len(m.cpu_s):.2f}",
            str(cell.against(name, "hvd_order")) if "hvd_order" in names else "",
        ] for name in names if (m := cell.systems.get(name))]  # fmt: skip
    text = table(
        ["model", "hosts", "Mbit/s", "ratio", "wire s", "local s", "optimum s", "system", "step s",
         "range", "/ optimum", "E", "link %", "CPU s", "/ hvd_order [95 %]"], rows,
    )  # fmt: skip
    return text if header else "\n".join(text.split("\n")[2:])


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
    draw_bars(cells, folder / f"{name}_bars.png")
    draw_efficiency(cells, folder / f"{name}_efficiency.png")
    draw_steps(cells[0], folder / f"{name}_step.png")
    print(f"pictures: out/results/{name}_*.png")


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
