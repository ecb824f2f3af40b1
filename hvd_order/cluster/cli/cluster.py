"""``hvd-order cluster`` and its own sub-commands."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import hvd_order.cluster.cli.cluster_run
import hvd_order.cluster.cli.cluster_serve

__all__ = ["add_options", "main"]


@dataclass(frozen=True)
class _ClusterCommand:
    """A sub-command: its line in the list, its options, and the function that runs it."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


_COMMANDS = {
    "run": _ClusterCommand(
        "simulate a trace of jobs under one or several policies, and compare them",
        hvd_order.cluster.cli.cluster_run.add_run_options,
        hvd_order.cluster.cli.cluster_run.run_main,
    ),
    "serve": _ClusterCommand(
        "run jobs for real on hosts, under a policy",
        hvd_order.cluster.cli.cluster_serve.add_serve_options,
        hvd_order.cluster.cli.cluster_serve.serve_main,
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the sub-commands to the parser of ``hvd-order cluster``."""
    commands = parser.add_subparsers(
        dest="cluster_command", metavar=" | ".join(_COMMANDS), required=True
    )
    for name, command in _COMMANDS.items():
        command.add_options(
            commands.add_parser(name, help=command.help, description=command.help.capitalize())
        )


def main(parsed: argparse.Namespace) -> int:
    """Runs a sub-command and returns the exit code.

    Raises:
        ImportError: numpy or scipy is not installed.
        InvalidUsage, OSError: what the sub-command raises.
    """
    missing = [name for name in ("numpy", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"hvd-order cluster needs {' and '.join(missing)}; install it with: "
            "pip install 'hvd_order[cluster]', or pip install numpy scipy"
        )
    return _COMMANDS[parsed.cluster_command].main(parsed)
