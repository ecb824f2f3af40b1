"""Parses the command line of ``hvd-order`` and calls one function per sub-command."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_order import __version__
from hvd_order.errors import InvalidUsage
from hvd_order.launch.run import LaunchRequest, local_process_count, parse_hosts, run

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns the exit code; 2 for a mistake on the command line.

    Args:
        argv: arguments without the program's name; None: ``sys.argv``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:  # has options of its own, --help among them
        return _demo(arguments[1:])
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        if parsed.subcommand == "run":
            return _run(parsed)
        if parsed.subcommand == "timeline":
            return _timeline(parsed)
    except (InvalidUsage, ImportError, OSError) as error:
        sys.stderr.write(f"hvd-order: {error}\n")
        return 2
    parser.print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvd-order",
        description="Ordered, preemptible communication for data-parallel training.",
    )
    parser.add_argument("--version", action="version", version=f"hvd-order {__version__}")
    commands = parser.add_subparsers(dest="subcommand", metavar="run | demo | bench | timeline")

    start = commands.add_parser(
        "run",
        help="start a command N times on this host",
        usage="hvd-order run -np N [options] command ...",
        description="Starts a command N times on this host, each with its rank in the environment.",
    )
    start.add_argument("-np", "--num-proc", type=int, metavar="N", help="how many processes")
    start.add_argument(
        "-H", "--hosts", metavar="HOST:SLOTS", help="only this host, for example localhost:4"
    )
    start.add_argument(
        "--timeline-filename", metavar="F", help="write what happened when (HVD_ORDER_TIMELINE)"
    )
    start.add_argument(
        "-x",
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for the processes; they also have all of this shell's",
    )
    start.add_argument("--verbose", action="store_true", help="show the launcher's log as well")
    start.add_argument("command", nargs=argparse.REMAINDER, help="program and its arguments")

    commands.add_parser("demo", help="train a small GPT on two workers and compare with DDP")

    commands.add_parser("bench", help="compare with DDP and Horovod on emulated hosts")

    draw = commands.add_parser("timeline", help="draw a timeline file as a picture")
    draw.add_argument("trace", type=Path, help="file that HVD_ORDER_TIMELINE named")
    draw.add_argument("-o", "--output", type=Path, help="PNG file (default: beside the trace)")
    draw.add_argument("--steps", type=int, nargs="+", metavar="STEP", help="which training steps")
    draw.add_argument("--rank", type=int, help="which rank, if the file has several")
    return parser


def _run(parsed: argparse.Namespace) -> int:
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    hosts = parse_hosts(parsed.hosts) if parsed.hosts else []
    count = local_process_count(parsed.num_proc, hosts, command)
    env: dict[str, str] = {}
    for assignment in parsed.env:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise InvalidUsage(f"-x {assignment}: expected NAME=VALUE")
        env[name] = value
    if parsed.timeline_filename:
        env["HVD_ORDER_TIMELINE"] = str(Path(parsed.timeline_filename).absolute())
    return run(LaunchRequest(command, count, env, parsed.verbose))


def _timeline(parsed: argparse.Namespace) -> int:
    from hvd_order.report.timeline import draw_timeline

    output = parsed.output or parsed.trace.with_suffix(".png")
    draw_timeline(parsed.trace, output, parsed.steps, rank=parsed.rank)
    sys.stdout.write(f"{output}\n")
    return 0


def _bench(arguments: Sequence[str]) -> int:
    # Benchmarks are no part of the installed package: they need the checkout and its peers.
    inside = Path("benchmarks", "side_by_side", "main.py")
    script = next(
        (p for root in (Path(__file__).parents[2], Path.cwd()) if (p := root / inside).exists()),
        None,
    )
    if script is None:
        sys.stderr.write(
            "hvd-order: bench needs the benchmarks of the source tree; run it in a checkout\n"
        )
        return 2
    return subprocess.run([sys.executable, str(script), *arguments]).returncode


def _demo(arguments: Sequence[str]) -> int:
    try:
        from hvd_order.demo import train
    except ImportError as error:
        sys.stderr.write(f"hvd-order: the demo cannot start: {error}\n")
        return 2
    return train.main(arguments)
