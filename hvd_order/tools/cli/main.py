"""Parses the command line of ``hvd-order`` and calls one function per sub-command."""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hvd_order.cluster.cli.cluster
import hvd_order.planning.cli.predict
import hvd_order.planning.cli.profile
import hvd_order.planning.cli.report
import hvd_order.planning.cli.tune
import hvd_order.planning.cli.what_if
import hvd_order.servers.cli
import hvd_order.tools.check.command
import hvd_order.tools.doctor.command
import hvd_order.watch.cli.top
from hvd_order import __version__
from hvd_order.base.errors import HorovodInternalError, InvalidUsage
from hvd_order.launch.options import add_options, request_from
from hvd_order.launch.run import run
from hvd_order.tools.cli.completion import KINDS, write_completion
from hvd_order.tools.cli.parser import CommandParser, nearest

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns the exit code.

    It is 2 for a mistake on the command line, 1 if a job cannot be reached or the reader of the
    output, such as ``head``, has ended.

    Args:
        argv: arguments without the program's name; None: ``sys.argv``.
    """
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except (InvalidUsage, ImportError, OSError, UnicodeDecodeError) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_ended():
            # Python flushes once more when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        sys.stderr.write(f"hvd-order: {_told(error)}\n")
        return 2
    except HorovodInternalError as error:
        sys.stderr.write(f"hvd-order: {error}\n")
        return 1


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["demo"]:  # has options of its own, --help among them
        return _demo(arguments[1:])
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    known = {**_COMMANDS, **_WITH_OWN_PARSER}
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        raise InvalidUsage(
            f"there is no command {arguments[0]!r}{nearest(arguments[0], known)}; "
            "`hvd-order --help` lists all, and `hvd-order run` starts a program"
        )
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.subcommand is None:
        parser.print_help()
        return 2
    return _COMMANDS[parsed.subcommand].main(parsed)


def _told(error: Exception) -> str:
    """What a user reads of an error."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    if isinstance(error, FileNotFoundError):
        absolute = Path(os.fsdecode(error.filename)).absolute()
        there = next(each for each in (absolute, *absolute.parents) if each.exists())
        return f"there is no file {error.filename}; of its path {there} is there: check the name"
    return f"{error.filename}: {error.strerror}"


def _reader_has_ended() -> bool:
    """Whether the broken pipe is that of the output, not a connection's."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hvd-order",
        description="Ordered, preemptible communication for data-parallel training.",
    )
    parser.add_argument("--version", action="version", version=f"hvd-order {__version__}")
    commands = parser.add_subparsers(
        dest="subcommand",
        metavar="run | top | check | doctor | demo | bench | timeline | report | profile | advise "
        "| plan | tune | predict | cluster | serve | servers | completion",
    )
    for name, command in _COMMANDS.items():
        command.add_options(
            commands.add_parser(
                name,
                help=command.help,
                usage=command.usage,
                description=command.description,
                allow_abbrev=command.abbreviations,
            )
        )
        if name == "doctor":  # the next two in the list of --help; `main` runs them
            for own_parser, text in _WITH_OWN_PARSER.items():
                commands.add_parser(own_parser, help=text)
    return parser


def _run(parsed: argparse.Namespace) -> int:
    if parsed.check_build:
        return _check_build()
    return run(request_from(parsed))


def _check_build() -> int:
    """What ``horovodrun --check-build`` shows."""
    import hvd_order.torch as hvd

    def mark(there: object) -> str:
        return "[X]" if there else "[ ]"

    sys.stdout.write(
        f"hvd-order {__version__}\n\nAvailable Frameworks:\n    {mark(True)} PyTorch\n\n"
        f"Available Controllers:\n    {mark(hvd.mpi_built())} MPI\n"
        f"    {mark(hvd.gloo_built())} Gloo\n\n"
        f"Available Tensor Operations:\n    {mark(hvd.nccl_built())} NCCL\n"
        f"    {mark(hvd.mpi_built())} MPI\n    {mark(hvd.gloo_built())} Gloo\n"
    )
    return 0


def _add_timeline_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="file that HVD_ORDER_TIMELINE named")
    parser.add_argument("-o", "--output", type=Path, help="PNG file (default: beside the trace)")
    parser.add_argument("--steps", type=int, nargs="+", metavar="STEP", help="which training steps")
    parser.add_argument("--rank", type=int, help="which rank, if the file has several")


def _timeline(parsed: argparse.Namespace) -> int:
    from hvd_order.planning.report.timeline import draw_timeline

    output = parsed.output or parsed.trace.with_suffix(".png")
    said = draw_timeline(parsed.trace, output, parsed.steps, rank=parsed.rank)
    sys.stdout.write(f"{said}\n{output}\n")
    return 0


def _add_completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS)


def _bench(arguments: Sequence[str]) -> int:
    # Benchmarks are no part of the installed package: they need the checkout and its peers.
    roots = (Path(__file__).parents[3], Path.cwd())
    root = next((each for each in roots if (each / "benchmarks/torch").exists()), None)
    if root is None:
        sys.stderr.write(
            "hvd-order: bench needs the folder benchmarks, which no wheel has; unpack the sdist "
            "and run it there\n"
        )
        return 2
    emulated, real = "benchmarks.torch.side_by_side", "benchmarks.torch.nodes"
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if any(a in ("-h", "--help") for a in arguments):
        forms = {"Models of measured durations on emulated hosts:": emulated,
                 "Real models, with -np, -H or --emulated-hosts:": real}  # fmt: skip
        for title, module in forms.items():
            command = [sys.executable, "-m", module, "--help"]
            text = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True).stdout
            sys.stdout.write(f"{title}\n\n{text}\n")
        return 0
    on_nodes = any(a == "-np" or a.startswith(("-H", "--emulated-hosts")) for a in arguments)
    module = real if on_nodes else emulated
    return subprocess.run([sys.executable, "-m", module, *arguments], env=env).returncode


def _demo(arguments: Sequence[str]) -> int:
    try:
        from hvd_order.tools.demo import train
    except ImportError as error:
        sys.stderr.write(f"hvd-order: the demo cannot start: {error}\n")
        return 2
    return train.main(arguments)


@dataclass(frozen=True)
class _Command:
    """A sub-command.

    Attributes:
        help: what it does, in the list of sub-commands.
        description: what it does, at the top of its own help; None: nothing.
        add_options: adds its options to its parser.
        main: runs it and returns the exit code.
        usage: line that shows how to call it; None: as argparse makes it.
        abbreviations: whether an option may be abbreviated.
    """

    help: str
    description: str | None
    add_options: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]
    usage: str | None = None
    abbreviations: bool = True


_WITH_OWN_PARSER = {
    "demo": "train a small GPT on two workers and compare with DDP",
    "bench": "compare with DDP and Horovod: on emulated hosts, or with -H or -np on real ones",
}
_COMMANDS = {
    "run": _Command(
        "start a command N times, on one or more hosts; horovodrun's options",
        "Starts a command N times, each with its rank in the environment.",
        add_options,
        _run,
        usage="hvd-order run -np N [options] command ...",
        abbreviations=False,
    ),
    "top": _Command(
        "where the time of a running job's steps goes, live",
        "Shows the ranks of a running job. Documentation: Monitoring.",
        hvd_order.watch.cli.top.add_options,
        hvd_order.watch.cli.top.main,
    ),
    "check": _Command(
        "find mistakes of distributed training in scripts",
        "Reads scripts, without running them. Documentation: Check scripts.",
        hvd_order.tools.check.command.add_options,
        hvd_order.tools.check.command.main,
    ),
    "doctor": _Command(
        "what is built and what works here; for bug reports",
        "Shows what is built and which transports work, and tests two ranks.",
        hvd_order.tools.doctor.command.add_options,
        hvd_order.tools.doctor.command.main,
    ),
    "profile": _Command(
        "record what the steps of a training script consist of",
        "Runs a script in one process for a few steps and writes its profile.",
        hvd_order.planning.cli.profile.add_options,
        hvd_order.planning.cli.profile.main,
        usage=hvd_order.planning.cli.profile.USAGE,
        abbreviations=False,
    ),
    "tune": _Command(
        "search for order, slices and credit by the simulator, and write a plan",
        "Simulates a profile's steps in many settings. Documentation: Tune slices and order.",
        hvd_order.planning.cli.tune.add_options,
        hvd_order.planning.cli.tune.main,
        abbreviations=False,
    ),
    "advise": _Command(
        "what ordering can gain for a profile, on this and other networks",
        "Says from a profile what ordering can gain at best, and which mode to use.",
        hvd_order.planning.cli.what_if.add_advise_options,
        hvd_order.planning.cli.what_if.advise_main,
    ),
    "plan": _Command(
        "what a step would take on a network, as today and in order",
        "Compares today's order of transfers with the planned one: table and picture.",
        hvd_order.planning.cli.what_if.add_plan_options,
        hvd_order.planning.cli.what_if.plan_main,
    ),
    "predict": _Command(
        "the throughput of N workers, with servers or all-reduce, from the profile of one",
        "Simulates a job of many workers from one worker's steps. Documentation: "
        "Predict throughput.",
        hvd_order.planning.cli.predict.add_options,
        hvd_order.planning.cli.predict.main,
    ),
    "cluster": _Command(
        "schedule many training jobs on the machines of a cluster, simulated",
        "Runs training jobs on the machines of a cluster. Documentation: Jobs of a cluster.",
        hvd_order.cluster.cli.cluster.add_options,
        hvd_order.cluster.cli.cluster.main,
    ),
    "serve": _Command(
        "be a parameter server of a job; hvd-order run --servers N starts N of them",
        "Serves until all workers have gone. Documentation: Parameter servers.",
        hvd_order.servers.cli.add_serve_options,
        hvd_order.servers.cli.serve_main,
        abbreviations=False,
    ),
    "servers": _Command(
        "take a parameter server out of a running job",
        "Gives an order to a running job; `serve` adds a server to one.",
        hvd_order.servers.cli.add_servers_options,
        hvd_order.servers.cli.servers_main,
        abbreviations=False,
    ),
    "timeline": _Command(
        "draw a timeline file as a picture",
        None,
        _add_timeline_options,
        _timeline,
    ),
    "report": _Command(
        "say from a timeline file what held up the steps, and what would help",
        "Says which waits were exposed, why, and what would shorten the steps. Documentation: "
        "Timeline.",
        hvd_order.planning.cli.report.add_options,
        hvd_order.planning.cli.report.main,
    ),
    "completion": _Command(
        "print a script that makes a shell complete hvd-order's options, or the manual page",
        'For bash: eval "$(hvd-order completion bash)". For man: hvd-order completion man > '
        "~/.local/share/man/man1/hvd-order.1. Needs: pip install shtab argparse-manpage",
        _add_completion_options,
        lambda parsed: write_completion(_parser(), parsed.kind),
    ),
}
