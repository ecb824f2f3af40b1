"""The command line of ``hvd-order run``, with all options of horovodrun 0.28.1.

An option works, or prints one line about why it has no effect (`_NOT_NEEDED`), or stops with an
error that names the replacement (`_INSTEAD`).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

from hvd_order import __version__
from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.config_file import arguments_of
from hvd_order.launch.hosts import Host, parse_hosts, read_hostfile
from hvd_order.launch.request import ElasticRules, LaunchRequest, OutputRules

__all__ = ["add_options", "request_from"]

_NEVER_S = 10**8
_SLICES = "slice sizes are chosen for model and network; HVD_ORDER_SLICE_BYTES sets one"
_NO_CYCLES = "there are no cycles: what is ready is sent at once"
_NCCL = "NCCL chooses its algorithms itself; NCCL_ALGO overrides it"
_TUNING = "HVD_ORDER_TUNE=0 turns the trials off; they need no settings"

# Names of an option -> number of its arguments, and the reason why it is not needed.
_NOT_NEEDED: dict[tuple[str, ...], tuple[int, str]] = {
    ("--disable-cache",): (0, "no checks are cached"),
    ("--fusion-threshold-mb",): (1, _SLICES),
    ("--cycle-time-ms",): (1, _NO_CYCLES),
    ("--timeline-mark-cycles",): (0, _NO_CYCLES),
    ("--cache-capacity",): (1, "there is no cache of tensor names to size"),
    ("--hierarchical-allreduce",): (0, _NCCL),
    ("--no-hierarchical-allreduce",): (0, _NCCL),
    ("--hierarchical-allgather",): (0, _NCCL),
    ("--no-hierarchical-allgather",): (0, _NCCL),
    ("--torus-allreduce",): (0, _NCCL),
    ("--no-torus-allreduce",): (0, _NCCL),
    ("--autotune-log-file",): (1, "the timeline shows the trials"),
    ("--autotune-warmup-samples",): (1, _TUNING),
    ("--autotune-steps-per-sample",): (1, _TUNING),
    ("--autotune-bayes-opt-max-samples",): (1, _TUNING),
    ("--autotune-gaussian-process-noise",): (1, _TUNING),
    ("--mpi-threads-disable",): (0, "MPI is not used"),
    ("--num-nccl-streams",): (1, "NCCL_MAX_NCHANNELS is the nearest setting"),
    ("--thread-affinity",): (1, "use taskset or numactl before the command"),
    ("--log-without-timestamp",): (0, "messages always have the time"),
    ("--log-with-timestamp",): (0, "messages always have the time"),
}
_INSTEAD: dict[tuple[str, ...], tuple[int, str]] = {
    ("--mpi",): (0, "start it with mpirun -np N ...; hvd_order understands its variables"),
    ("--jsrun",): (0, "start it with jsrun; its MPI variables are understood"),
    ("--mpi-args",): (1, "start it with mpirun and these arguments"),
    ("--tcp",): (0, "Gloo always uses TCP; for NCCL set -x NCCL_IB_DISABLE=1"),
    ("--binding-args",): (1, "use mpirun, or taskset or numactl before the command"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options, followed by the command."""
    _add_processes(parser)
    _add_hosts(parser)
    _add_elastic(parser)
    _add_settings(parser)
    for names, (takes, _) in {**_NOT_NEEDED, **_INSTEAD}.items():
        if takes:
            parser.add_argument(*names, help=argparse.SUPPRESS)
        else:
            parser.add_argument(*names, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="program and its arguments")


def _add_processes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-np", "--num-proc", type=int, metavar="N", help="how many processes")
    add("-x", "--env", action="append", default=[], metavar="NAME=VALUE",
        help="set a variable for the processes; they also have all of this shell's")  # fmt: skip
    add("--servers", type=int, default=0, metavar="N",
        help="start N parameter servers as well, and use them (HVD_ORDER_COMM=ps)")  # fmt: skip
    add("--min-servers", type=int, metavar="N",
        help="stop servers that do not make steps shorter, but keep N")  # fmt: skip
    add("--max-servers", type=int, metavar="N",
        help="start more servers while they make steps shorter, N at most")  # fmt: skip
    add("--oversubscribe", action="store_true",
        help="start more than 64 processes for a processor core of a host")  # fmt: skip
    add("--verbose", action="store_true", help="show the launcher's log as well")
    add("--output-filename", "--tee", type=Path, metavar="DIR",
        help="also write a rank's output to DIR/rank.N/stdout and stderr, on its host")  # fmt: skip
    add("-prefix-timestamp", "--prefix-timestamp", "--prefix-output-with-timestamp",
        action="store_true", help="begin each line of output with the time")  # fmt: skip
    add("--no-prefix", action="store_true", help="lines of output without [rank]")
    add("--config-file", type=Path, metavar="F",
        help="options in YAML, JSON or TOML, as of horovodrun; those given here win")  # fmt: skip
    add("--start-timeout", type=float, metavar="S",
        help="seconds for all hosts to answer (default: HOROVOD_START_TIMEOUT or 30)")  # fmt: skip
    add("-v", "--version", action="version", version=f"hvd-order {__version__}")
    add("-cb", "--check-build", action="store_true", help="show what is built in, and end")


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group("hosts; remote ones are reached by ssh without a password")
    which = hosts.add_mutually_exclusive_group()
    which.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="for example a:2,b:4")
    which.add_argument("-hostfile", "--hostfile", type=Path, metavar="F", help="lines: a slots=2")
    which.add_argument("--host-discovery-script", metavar="SCRIPT",
                       help="prints 'host:slots' lines; asked every second; elastic")  # fmt: skip
    add = hosts.add_argument
    add("--network-interface", "--network-interfaces", action="append", default=[], metavar="NIC",
        help="use this interface, on every host; more with commas or again")  # fmt: skip
    add("-p", "--ssh-port", type=int, metavar="PORT", help="of all hosts")
    add("-i", "--ssh-identity-file", metavar="F", help="private key for ssh")
    add("--ssh-option", action="append", default=[], metavar="NAME=VALUE",
        help="as ssh's -o, before ours; for example ServerAliveInterval=5")  # fmt: skip


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    elastic = parser.add_argument_group("elastic jobs: workers may die and hosts come and go")
    add = elastic.add_argument
    add("--min-np", "--min-num-proc", type=int, metavar="N", help="fewer: wait (default: -np)")
    add("--max-np", "--max-num-proc", type=int, metavar="N", help="never more (default: no limit)")
    add("--slots-per-host", "--slots", type=int, default=1, metavar="N",
        help="of discovered hosts that do not say (default: 1)")  # fmt: skip
    add("--reset-limit", type=int, metavar="N",
        help="end the job instead of forming it anew once more (default: no limit)")  # fmt: skip
    add("--elastic-timeout", type=float, metavar="S",
        help="seconds to wait for hosts (default: HOROVOD_ELASTIC_TIMEOUT or 600)")  # fmt: skip
    add("--blacklist-cooldown-range", type=float, nargs=2, metavar=("MIN", "MAX"),
        help="use a host that failed again after MIN seconds (default: never)")  # fmt: skip
    add("--formation-file", type=Path, metavar="F",
        help="write which hosts the job uses, as JSON, whenever that changes")  # fmt: skip


def _add_settings(parser: argparse.ArgumentParser) -> None:
    settings = parser.add_argument_group("settings of hvd_order under Horovod's names")
    add = settings.add_argument
    add("--timeline-filename", metavar="F", help="write what happened when (HVD_ORDER_TIMELINE)")
    add("--log-level", metavar="LEVEL",
        help="debug, info, warning or error: messages of hvd_order (HVD_ORDER_LOG)")  # fmt: skip
    add("--autotune", action="store_true", help="try slice sizes (HVD_ORDER_TUNE=1, the default)")
    add("--no-stall-check", action="store_true", help="no warnings about ranks that are late")
    add("--stall-check-warning-time-seconds", type=float, metavar="S",
        help="warn after that long (HVD_ORDER_STALL_WARNING)")  # fmt: skip
    add("--stall-check-shutdown-time-seconds", "--gloo-timeout-seconds", type=float, metavar="S",
        help="error after that long (HVD_ORDER_TIMEOUT)")  # fmt: skip
    add("--gloo", action="store_true", help="accepted; Gloo is what CPU tensors use")


def request_from(parsed: argparse.Namespace) -> LaunchRequest:
    """Converts options to a request; prints which of them have no effect.

    Raises:
        InvalidUsage: options contradict each other, or are not supported.
    """
    if parsed.config_file is not None:
        _add_from_file(parsed, parsed.config_file)
    for names, (_, cure) in _INSTEAD.items():
        if _given(parsed, names):
            raise InvalidUsage(f"{names[-1]} does not exist here: {cure}")
    for names, (_, reason) in _NOT_NEEDED.items():
        if _given(parsed, names):
            sys.stderr.write(f"hvd-order: {names[-1]} has no effect: {reason}\n")
    hosts = _hosts(parsed)
    elastic = any(
        value is not None
        for value in (parsed.min_np, parsed.max_np, parsed.reset_limit,
                      parsed.host_discovery_script)
    )  # fmt: skip
    count = parsed.num_proc if parsed.num_proc is not None else parsed.min_np if elastic else None
    if count is None:
        if not hosts:
            raise InvalidUsage("say how many processes to start, for example: -np 2")
        count = sum(host.slots for host in hosts)
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    ssh_options = []
    if parsed.ssh_port is not None:
        ssh_options += ["-p", str(parsed.ssh_port)]
    if parsed.ssh_identity_file is not None:
        ssh_options += ["-i", parsed.ssh_identity_file]
    for option in parsed.ssh_option:
        if not re.fullmatch(r"\w+[= ].+", option):
            raise InvalidUsage(f"--ssh-option {option}: expected NAME=VALUE")
        ssh_options += ["-o", option]
    return LaunchRequest(
        command=command,
        process_count=count,
        hosts=hosts,
        env=_variables(parsed),
        elastic=_rules(parsed, count) if elastic else None,
        interfaces=[nic for text in parsed.network_interface for nic in text.split(",") if nic],
        ssh_options=ssh_options,
        start_timeout_s=_seconds(parsed.start_timeout, "HOROVOD_START_TIMEOUT", 30.0),
        output=OutputRules(
            prefix=not parsed.no_prefix,
            timestamps=parsed.prefix_timestamp,
            folder=parsed.output_filename,
        ),
        verbose=parsed.verbose,
        servers=parsed.servers,
        min_servers=parsed.min_servers,
        max_servers=parsed.max_servers,
        oversubscribe=parsed.oversubscribe,
    )


class _FileParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidUsage(f"{self.prog}: {message}")


def _add_from_file(parsed: argparse.Namespace, path: Path) -> None:
    """Sets the options that a file names and the command line does not."""
    parser = _FileParser(prog=str(path), add_help=False, allow_abbrev=False)
    add_options(parser)
    found = parser.parse_args(arguments_of(path))
    for name, value in vars(found).items():
        default = parser.get_default(name)
        if value != default and getattr(parsed, name) == default and name != "command":
            setattr(parsed, name, value)


def _given(parsed: argparse.Namespace, names: tuple[str, ...]) -> bool:
    long = next(name for name in names if name.startswith("--"))
    value = getattr(parsed, long[2:].replace("-", "_"))
    return value is not None and value is not False


def _hosts(parsed: argparse.Namespace) -> list[Host]:
    if parsed.hosts is not None:
        return parse_hosts(parsed.hosts)
    return read_hostfile(parsed.hostfile) if parsed.hostfile is not None else []


def _rules(parsed: argparse.Namespace, count: int) -> ElasticRules:
    cooldown = parsed.blacklist_cooldown_range
    return ElasticRules(
        min_count=count if parsed.min_np is None else parsed.min_np,
        max_count=parsed.max_np,
        discovery_script=parsed.host_discovery_script,
        default_slots=parsed.slots_per_host,
        reset_limit=parsed.reset_limit,
        timeout_s=_seconds(parsed.elastic_timeout, "HOROVOD_ELASTIC_TIMEOUT", 600.0),
        cooldown_s=cooldown[0] if cooldown else None,
        formation_file=parsed.formation_file,
    )


def _seconds(given: float | None, variable: str, default: float) -> float:
    if given is not None:
        return given
    text = os.environ.get(variable)
    try:
        return float(text) if text else default
    except ValueError:
        raise InvalidUsage(f"{variable} is {text!r}; expected a number of seconds") from None


def _variables(parsed: argparse.Namespace) -> dict[str, str]:
    """Environment variables for the processes."""
    env: dict[str, str] = {}
    for assignment in parsed.env:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise InvalidUsage(f"-x {assignment}: expected NAME=VALUE")
        env[name] = value
    if parsed.timeline_filename:
        env["HVD_ORDER_TIMELINE"] = str(Path(parsed.timeline_filename).absolute())
    if parsed.log_level:
        env["HVD_ORDER_LOG"] = parsed.log_level
    if parsed.autotune:
        env["HVD_ORDER_TUNE"] = "1"
    if parsed.no_stall_check:
        env["HVD_ORDER_STALL_WARNING"] = str(_NEVER_S)
    elif parsed.stall_check_warning_time_seconds is not None:
        env["HVD_ORDER_STALL_WARNING"] = str(parsed.stall_check_warning_time_seconds)
    if parsed.stall_check_shutdown_time_seconds:  # 0 means never in Horovod, same as no option
        env["HVD_ORDER_TIMEOUT"] = str(parsed.stall_check_shutdown_time_seconds)
    return env
