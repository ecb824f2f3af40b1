"""Options of ``hvd-order cluster serve``."""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.cli.network_options import as_option
from hvd_order.planning.predict.units import parse_duration

if TYPE_CHECKING:
    from hvd_order.cluster.model.machines import Machines
    from hvd_order.cluster.serve.runner import Runner

__all__ = ["add_serve_options", "serve_main"]


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    add, duration = parser.add_argument, as_option(parse_duration)
    add("jobs", type=Path, nargs="?", help="CSV file; a line that is added later is a new job")
    add("--policy", default="fifo", help="who gets what (default: fifo)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="for example a:4,b:4")
    which.add_argument("--hostfile", type=Path, metavar="F", help="lines: a slots=4")
    add("--state", type=Path, default=Path("cluster-state"), metavar="DIR",
        help="folder for logs, commits and the journal; all hosts must see it (default: "
        "cluster-state)")  # fmt: skip
    about = parser.add_mutually_exclusive_group()
    about.add_argument("--status", action="store_true", help="show the jobs of --state and end")
    about.add_argument("--watch", action="store_true",
        help="show the jobs of --state until Ctrl-C, or until the scheduler ends")  # fmt: skip
    about.add_argument("--cancel", metavar="JOB",
        help="take a job of --state back: it stops at its next commit, and does not go on"
        )  # fmt: skip
    add("--json", action="store_true", help="--status as JSON")
    add("--once", action="store_true", help="end with the last job of the file")
    add("--slot", type=duration, metavar="TIME",
        help="ask the policy that often: 60s, 20min (default: whenever something happens)"
        )  # fmt: skip
    add("--until", type=duration, default=math.inf, metavar="TIME",
        help="until when policies plan that plan ahead, from the first start on")  # fmt: skip
    add("--resize-cost", type=duration, default=10.0, metavar="TIME",
        help="what a job loses by a start or a change, for the policy (default: 10s)")  # fmt: skip
    add("--restarts", type=int, default=2, metavar="N",
        help="start a job that failed again N times (default: 2)")  # fmt: skip
    add("--patience", type=duration, default=120.0, metavar="TIME",
        help="end a job that does not stop or let slots go by then (default: 2min)")  # fmt: skip
    add("--host-timeout", type=duration, default=60.0, metavar="TIME",
        help="longest wait of a job for its hosts (default: 1min)")  # fmt: skip
    add("--run-options", default="", metavar="OPTIONS",
        help="further options of hvd-order run, for example '--ssh-port 2222'")  # fmt: skip
    add("--slurm", action="store_true", help="run jobs by sbatch; hosts are Slurm's nodes")
    add("--sbatch-options", default="", metavar="OPTIONS",
        help="further options of sbatch; {slots} in them is the largest number of workers on a "
        "node, for example '--gpus-per-node={slots}'")  # fmt: skip


def serve_main(parsed: argparse.Namespace) -> int:
    """Serves until Ctrl-C, SIGTERM, or the last job.

    Returns:
        The exit code.

    Raises:
        InvalidUsage: options or the jobs file are wrong, or the policy does what it cannot.
        OSError: a file cannot be read or written.
    """
    if parsed.status or parsed.watch or parsed.cancel is not None:
        from hvd_order.cluster.cli import cluster_status

        return cluster_status.main(parsed.state, parsed.cancel, parsed.watch, parsed.json)
    from hvd_order.cluster.policies.registry import PolicyInputs, policy
    from hvd_order.cluster.serve.jobs_file import read_jobs
    from hvd_order.cluster.serve.scheduler import JobScheduler, ServeRules

    if parsed.jobs is None:
        raise InvalidUsage("no file with jobs; give one: hvd-order cluster serve -H a:4 jobs.csv")
    machines = _machines(parsed)
    rules = ServeRules(
        parsed.slot, parsed.resize_cost, parsed.restarts, parsed.patience, parsed.once
    )
    examples = [served.job for _, served in read_jobs(parsed.jobs)]
    chosen = policy(parsed.policy, PolicyInputs(machines, parsed.slot, parsed.until, examples))
    scheduler = JobScheduler(parsed.state, parsed.jobs, machines, chosen, _runner(parsed), rules)
    stop, at_once = threading.Event(), threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            at_once.set()
        stop.set()

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        return scheduler.run(stop, at_once)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _machines(parsed: argparse.Namespace) -> Machines:
    from hvd_order.cluster.model.machines import Machine, Machines
    from hvd_order.cluster.serve.jobs_file import SLOT
    from hvd_order.launch.hosts import parse_hosts, read_hostfile

    if parsed.hosts is None and parsed.hostfile is None:
        raise InvalidUsage("no hosts; name them with -H host:slots,... or --hostfile")
    hosts = (
        parse_hosts(parsed.hosts) if parsed.hosts is not None else read_hostfile(parsed.hostfile)
    )
    return Machines([Machine(host.name, {SLOT: float(host.slots)}) for host in hosts])


def _runner(parsed: argparse.Namespace) -> Runner:
    from hvd_order.cluster.serve.local import LocalRunner
    from hvd_order.cluster.serve.slurm import SlurmRunner

    folder = parsed.state / "jobs"
    if parsed.slurm:
        return SlurmRunner(folder, shlex.split(parsed.sbatch_options))
    return LocalRunner(folder, parsed.host_timeout, shlex.split(parsed.run_options))
