"""DDP, FSDP2, Horovod and hvd_order on real nodes, with models that people train: see README.md."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist

from benchmarks.hosts import EmulatedHosts, HostsUnavailable
from benchmarks.hosts.main import first_failure
from benchmarks.runner.records.environment import ROOT, describe, environment
from benchmarks.runner.records.record import settings_of, table_of, write_record
from benchmarks.runner.systems import SYSTEMS, Trainer
from benchmarks.runner.turns import turns
from benchmarks.runner.workloads.trained import WORKLOADS, build
from benchmarks.torch.nodes_measure import link_gbit, on_all_ranks, profiled_exposed, seconds_a_step
from benchmarks.torch.nodes_report import summarize, verdicts

_WARM_UP = 5
_COMPARED = ("ddp", "ddp_tuned", "fsdp2", "horovod", "hvd_order")
_TUNED_BUCKETS_MIB = (1, 5, 25, 100)  # what `ddp_tuned` tries; it takes the fastest
_OF_EMULATED = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def main() -> int:
    options = _options()
    return _rank(options) if "RANK" in os.environ else _launch(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compares systems on these nodes. With -H or -np it starts its ranks by "
        "`hvd-order run`; torchrun starts it as it starts a training script.",
        allow_abbrev=False,
    )
    parser.add_argument("-np", type=int, metavar="N", help="ranks")
    parser.add_argument("-H", metavar="HOSTS", help="hosts with their ranks: node1:8,node2:8")
    parser.add_argument(
        "--network-interface", metavar="NAME", help="interface by which the hosts reach each other"
    )
    parser.add_argument(
        "--emulated-hosts", type=int, metavar="N",
        help="in place of -np and -H: a rank on each of N emulated hosts of this machine; they "
        "share its first GPU",
    )  # fmt: skip
    parser.add_argument(
        "--rate-mbit", type=float, default=1000, metavar="R",
        help="rate of an emulated host's link, each way (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--models", nargs="+", choices=sorted(WORKLOADS), default=["resnet50"])
    parser.add_argument(
        "--systems", nargs="+", choices=_COMPARED, default=["ddp", "ddp_tuned", "hvd_order"]
    )
    parser.add_argument("--batch", type=int, metavar="N", help="samples a rank (default: by model)")
    parser.add_argument(
        "--precision", choices=["bf16", "fp32"],
        help="autocast to bfloat16, or none (default: bf16 on cuda, fp32 on cpu)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=7, help="turns a system (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps a turn (default: %(default)s)")
    parser.add_argument("--settle", type=int, default=1500, metavar="STEPS",
                        help="steps after which trials are cut off (default: 1500)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "out/nodes/result.json", metavar="FILE",
                        help="result file, beside it table and picture")  # fmt: skip
    options = parser.parse_args()
    options.precision = options.precision or ("bf16" if options.device == "cuda" else "fp32")
    return options


def _launch(options: argparse.Namespace) -> int:
    if options.emulated_hosts is not None:
        return _launch_emulated(options)
    if options.np is None and options.H is None:
        sys.stderr.write(
            "say where the ranks are: -np N for this host, -H node1:8,node2:8 for several, "
            "--emulated-hosts N; or start this program with torchrun\n"
        )
        return 2
    launcher = [sys.executable, "-m", "hvd_order.tools.cli", "run", "--no-prefix"]
    launcher += ["-np", str(options.np)] if options.np is not None else []
    launcher += ["-H", options.H] if options.H is not None else []
    if options.network_interface:
        launcher += ["--network-interface", options.network_interface]
    return subprocess.run([*launcher, sys.executable, *sys.argv]).returncode


def _launch_emulated(options: argparse.Namespace) -> int:
    """A rank on each emulated host, told what torchrun would tell it."""
    try:
        made = EmulatedHosts(options.emulated_hosts, options.rate_mbit)
    except (HostsUnavailable, ValueError) as error:
        sys.stderr.write(f"no emulated hosts: {error}\n")
        return 2
    with made as hosts:
        ranks = []
        for host in range(options.emulated_hosts):
            env = {**os.environ, **hosts.rank_environment(host), **_OF_EMULATED}
            command = [sys.executable, *sys.argv]
            ranks.append(hosts.popen(host, command, env=env, own_memory=False))
        return first_failure(ranks)  # closing the hosts ends what still runs on them


def _rank(options: argparse.Namespace) -> int:
    found = environment()
    device = _device(options)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(describe(found) + "\n", flush=True)
    rate = link_gbit(device)
    raw, summaries = [], []
    for model in options.models:
        row = _compare(model, options, device, rank)
        raw.append(row)
        summaries.append(summarize(row))
    if rank == 0:
        settings = {**settings_of(options), "ranks": size}
        summary = {"link_gbit": rate, "rows": summaries}
        path = write_record("nodes", found, settings, {"rows": raw}, summary, options.out)
        said = "\n".join(verdicts(summaries, rate, size))
        print(said)
        path.with_suffix(".md").write_text(f"{table_of(path)}\n\n{said}\n", "utf-8")
        from benchmarks.runner.cells.pictures import draw_bars  # matplotlib is not on every node

        bars = {one["model"]: {name: s["over_local"] for name, s in one["systems"].items()}
                for one in summaries}  # fmt: skip
        draw_bars(bars, "step / step without communication", options.out.with_suffix(".png"))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _device(options: argparse.Namespace) -> torch.device:
    if options.device == "cpu":
        ranks = options.emulated_hosts or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        return torch.device("cpu")
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= gpus and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        raise SystemExit(
            f"local rank {local_rank} has no GPU: this node has {gpus}. From NCCL 2.30 on, two "
            "ranks can share one, to try the benchmark: NCCL_MULTI_RANK_GPU_ENABLE=1"
        )
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device


def _compare(
    model: str, options: argparse.Namespace, device: torch.device, rank: int
) -> dict[str, Any]:
    """All systems with a model, in turns; each trains a copy of its own."""
    autocast = options.precision == "bf16"

    def say(text: str) -> None:
        if rank == 0:
            print(f"{model}: {text}", file=sys.stderr, flush=True)

    def make(system: str, **settings: Any) -> Trainer:
        work = build(model, device, rank, options.batch, autocast)
        made = SYSTEMS[system.removesuffix("_tuned")](work, **settings)
        for _ in range(_WARM_UP):
            made.step()
        return made

    trainers = {"local": make("local")}
    for name in options.systems:
        settings = {}
        if name == "ddp_tuned":
            times = {}
            for bucket_mib in _TUNED_BUCKETS_MIB:
                tried = make(name, bucket_mib=bucket_mib)
                times[bucket_mib] = seconds_a_step(tried.step, options.steps, device)
                del tried
                gc.collect()
            settings = {"bucket_mib": min(times, key=lambda mib: times[mib])}
        trainers[name] = make(name, **settings)
        done = 0
        while done < options.settle and not on_all_ranks(trainers[name].settled(), device):
            for _ in range(10):
                trainers[name].step()
            done += 10
        say(f"{name} is ready" + (f", after {done} steps of trials" if done else ""))
    steps: dict[str, list[float]] = {name: [] for name in trainers}
    for turn, name in turns(list(trainers), options.rounds):
        say(f"round {turn + 1} of {options.rounds}, {name}")
        trainer = trainers[name]
        trainer.step()  # the first one after another system's turn
        steps[name].append(seconds_a_step(trainer.step, options.steps, device, trainer.finish))
    say("profiles")
    systems = {
        name: {
            "steps": steps[name],
            "profiled_exposed_s": profiled_exposed(
                trainers[name].step, device, trainers[name].finish
            ),
            "note": trainers[name].note(),
        }
        for name in options.systems
    }
    for trainer in trainers.values():
        trainer.close()
    trainers.clear()
    gc.collect()
    return {"model": model, "local": steps["local"], "systems": systems}


if __name__ == "__main__":
    sys.exit(main())
