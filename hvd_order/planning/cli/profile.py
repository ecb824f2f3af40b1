"""Options of ``hvd-order profile`` and what it does with them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.environment import rank_info
from hvd_order.launch.hosts import parse_hosts, read_hostfile
from hvd_order.launch.request import LaunchRequest, OutputRules
from hvd_order.launch.run import run
from hvd_order.planning.files.chrome_trace import profile_of_trace
from hvd_order.planning.files.outside import outside_line
from hvd_order.planning.files.profile import LEAST_RUNS, Profile
from hvd_order.planning.report.server_costs import job_text, lines_of

__all__ = ["USAGE", "add_options", "main"]

USAGE = (
    "hvd-order profile [-np N] [--servers S] [-o FILE] [--steps N] train.py [arguments ...]\n"
    "       hvd-order profile --tensorflow-servers [-o FILE] [--steps N] coordinator.py [...]\n"
    "       hvd-order profile --from-trace TRACE [-o FILE]"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    add = parser.add_argument
    add("-o", "--output", type=Path, help="file (default: beside the script, SCRIPT.profile.json)")
    add("--steps", type=int, default=8, help="recorded steps, at least 5")
    add(
        "-np", "--num-proc", type=int, metavar="N",
        help="measure the transport among N processes as well; all options of hvd-order run: "
        "hvd-order run -np N ... hvd-order profile train.py",
    )  # fmt: skip
    add("--servers", type=int, default=0, metavar="S",
        help="train with S parameter servers, started as by hvd-order run, and measure what they "
        "cost: link, updates, both ends (default: none)")  # fmt: skip
    add("--tensorflow-servers", action="store_true",
        help="the script is the coordinator of TensorFlow's ParameterServerStrategy, whose workers "
        "and servers are running: trace the first worker and all servers")  # fmt: skip
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="where, as for run")
    hosts.add_argument("-hostfile", "--hostfile", type=Path, metavar="F", help="as for run")
    add("--from-trace", type=Path, metavar="TRACE",
        help="import a trace of torch.profiler (documentation: Tune slices and order)")  # fmt: skip
    add("script", type=Path, nargs="?")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")


def main(parsed: argparse.Namespace) -> int:
    """Writes the profile and prints a summary.

    Returns:
        The exit code.

    Raises:
        InvalidUsage: the options contradict each other, or no profile can be made.
        HorovodInternalError: servers do not come, or are lost.
        ImportError: PyTorch is not installed, and a script is to be profiled.
        OSError: a file cannot be read or written.
    """
    if parsed.from_trace is not None:
        return _import(parsed)
    if parsed.script is None:
        raise InvalidUsage("name a training script, or a trace with --from-trace")
    if parsed.steps < LEAST_RUNS:
        raise InvalidUsage(f"--steps is {parsed.steps}; at least {LEAST_RUNS} are needed")
    if not parsed.script.is_file():
        raise InvalidUsage(f"there is no file {parsed.script}")
    output: Path = parsed.output or parsed.script.with_suffix(".profile.json")
    if parsed.tensorflow_servers:
        _refuse("--tensorflow-servers", parsed, "servers")
        from hvd_order.tensorflow.strategy.script import profile_coordinator

        return _write(
            profile_coordinator(parsed.script, parsed.arguments, parsed.steps, output), output
        )
    here = parsed.num_proc is None and parsed.hosts is None and parsed.hostfile is None
    if not here or parsed.servers != 0:
        return run(_on_ranks(parsed, output))
    with_servers = Config.from_environment(os.environ).servers is not None
    if with_servers or rank_info(os.environ).size > 1:
        recorded = _record_in_job(with_servers)(
            parsed.script, parsed.arguments, parsed.steps, output
        )
        if recorded is not None:
            _say(recorded, output)
        return 0
    from hvd_order.planning.profiling.script import profile_script

    return _write(profile_script(parsed.script, parsed.arguments, parsed.steps), output)


def _record_in_job(
    with_servers: bool,
) -> Callable[[Path, Sequence[str], int, Path], Profile | None]:
    if with_servers:
        from hvd_order.planning.profiling.with_servers import profile_with_servers

        return profile_with_servers
    from hvd_order.planning.profiling.ranks import profile_on_ranks

    return profile_on_ranks


def _import(parsed: argparse.Namespace) -> int:
    _refuse("--from-trace", parsed, "script", "servers", "tensorflow_servers")
    profile = profile_of_trace(parsed.from_trace)
    name = f"{profile.model}.profile.json"
    return _write(profile, parsed.output or parsed.from_trace.with_name(name))


def _refuse(option: str, parsed: argparse.Namespace, *names: str) -> None:
    """Refuses an option that this one leaves without effect."""
    for name in (*names, "num_proc", "hosts", "hostfile"):
        if getattr(parsed, name):
            raise InvalidUsage(f"{option} needs no {name.replace('_', '-')}; leave it out")


def _write(profile: Profile, output: Path) -> int:
    profile.write(output)
    _say(profile, output)
    return 0


def _on_ranks(parsed: argparse.Namespace, output: Path) -> LaunchRequest:
    """This command again, on every rank."""
    hosts = parse_hosts(parsed.hosts) if parsed.hosts is not None else []
    if parsed.hostfile is not None:
        hosts = read_hostfile(parsed.hostfile)
    count = parsed.num_proc
    if count is None:
        count = sum(host.slots for host in hosts) if hosts else 1
    command = [
        sys.executable, "-m", "hvd_order.tools.cli", "profile", "--steps", str(parsed.steps),
        "-o", str(output), str(parsed.script), *parsed.arguments,
    ]  # fmt: skip
    return LaunchRequest(
        command=command,
        process_count=count,
        hosts=hosts,
        servers=parsed.servers,
        output=OutputRules(prefix=False),
    )


def _say(profile: Profile, output: Path) -> None:
    graph = profile.graph("median")
    size = sum(parameter.size_bytes for parameter in graph.parameters)
    link = profile.link
    sys.stdout.write(
        f"{output}: {len(graph.ops)} ops, {graph.compute_s * 1e3:.1f} ms; "
        f"{len(graph.parameters)} parameters, {size / 1e6:.1f} MB"
    )
    if link is not None:
        wire_s = size * link.link.seconds_per_byte
        sys.stdout.write(f"; {link.backend}, {link.ranks} ranks, {wire_s * 1e3:.1f} ms for them")
    sys.stdout.write("\n")
    line = outside_line(profile)
    if line is not None:
        sys.stdout.write(f"{line}\n")
    if profile.servers is not None:
        sys.stdout.write(f"with {job_text(profile.servers)}:\n")
        sys.stdout.writelines(f"  {line}\n" for line in lines_of(profile.servers))
