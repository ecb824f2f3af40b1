"""Which carrier of TensorFlow's gradients is faster, torch.distributed or MPI? See README.md."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.hosts import EmulatedHosts, why_not
from benchmarks.runner.records.environment import describe, environment
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import turns

_JOB = Path(__file__).with_name("job.py")
_LIMIT_S = 300
# mpirun would reach the other hosts by ssh; this enters their namespaces instead. Its arguments:
# options of ssh, the host's address, the command.
_AGENT = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -o|-p|-l|-i) shift 2;; *) shift;; esac; done
host=$1; shift
case $host in
{cases}
esac
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(" See")[0] if __doc__ else None)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, default=1000.0)
    parser.add_argument(
        "--compute-s", type=float, default=0.87, help="of forward and backward (ResNet-50's wire)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured steps in each turn")
    add_out_option(parser)
    options = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"emulated hosts do not work here: {reason}", file=sys.stderr)
        return 2
    found = environment()
    print(describe(found) + "\n", flush=True)
    seconds: dict[str, list[float]] = {"c10d": [], "mpi": []}
    cpu_s: dict[str, list[float]] = {"c10d": [], "mpi": []}
    with EmulatedHosts(count=options.hosts, rate_mbit=options.rate_mbit) as hosts:
        for _, name in turns(list(seconds), options.rounds):
            answer = _run(hosts, name, options)
            seconds[name] += answer["seconds"]
            cpu_s[name].append(answer["cpu_s"])
    for name, values in seconds.items():
        print(
            f"{name:<5} step {statistics.median(values):.3f} s, range {min(values):.3f}-"
            f"{max(values):.3f}, processor time {statistics.median(cpu_s[name]):.2f} s"
        )
    ratio = paired_ratio(seconds["mpi"], seconds["c10d"])
    print(f"mpi / c10d {ratio}")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    write_record("backends", found, settings_of(options), {"seconds": seconds, "cpu_s": cpu_s},
                 {"step_s": medians, "mpi_over_c10d": ratio.to_json()}, options.out)  # fmt: skip
    return 0


def _run(hosts: EmulatedHosts, backend: str, options: argparse.Namespace) -> dict[str, Any]:
    numbers = [str(n) for n in (options.compute_s, options.hosts, options.steps)]
    job = [sys.executable, str(_JOB), options.model, *numbers]
    env = {
        **os.environ,
        "HVD_ORDER_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="hvd_order_mpi_") as folder:
        if backend == "mpi":
            commands = [_mpirun(hosts, Path(folder)) + job]
            environments = [{**env, "TMPDIR": folder}]
        else:
            commands = [job] * options.hosts
            environments = [
                {**env, **hosts.rank_environment(rank)} for rank in range(options.hosts)
            ]
        ranks = [
            hosts.popen(rank, command, env=variables, stdout=subprocess.PIPE, text=True)
            for rank, (command, variables) in enumerate(zip(commands, environments, strict=True))
        ]
        outputs = [rank.communicate(timeout=_LIMIT_S)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{backend}: the ranks ended with {[r.returncode for r in ranks]}")
    (line,) = [line for line in outputs[0].splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(line)
    return answer


def _mpirun(hosts: EmulatedHosts, folder: Path) -> list[str]:
    found = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        raise SystemExit("there is no mpirun: pip install -r requirements/tensorflow.txt")
    agent = folder / "agent.sh"
    cases = "\n".join(
        f'{address}) exec {" ".join(hosts.inside(host))} bash -c "export TMPDIR={folder}; $*";;'
        for host, address in enumerate(hosts.addresses)
    )
    agent.write_text(_AGENT.format(cases=cases))
    agent.chmod(0o755)
    return [
        found, "--allow-run-as-root", "--bind-to", "none",
        "--prtemca", "plm_ssh_agent", str(agent),
        "--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0",
        "-H", ",".join(f"{address}:1" for address in hosts.addresses),
        "-n", str(len(hosts.addresses)),
        # Not all of the environment goes to other hosts by itself.
        *(f for name in ("HVD_ORDER_BACKEND", "TF_CPP_MIN_LOG_LEVEL", "OMP_NUM_THREADS", "PATH")
          for f in ("-x", name)),
        "-x", "GLOO_SOCKET_IFNAME=eth0",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
