"""A question: it declares its options and what it measures; its one result file is written here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hosts import QUEUE_MS, HostsUnavailable, why_not
from benchmarks.runner.fleet import RankFailed
from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import DEFAULT_FOLDER, settings_of, write_record

WORKER_OPTION = "--worker"
"""A module that is started with it is a rank; rank 0 writes its result to the named file."""


@dataclass(frozen=True)
class Answer:
    """What was measured, as the result file keeps it (`runner.records.schema`).

    Attributes:
        raw: every measurement.
        summary: what follows from them.
        settings: further settings beside the options.
        failed: why the run ends with an error; empty if it does not. The file is written first.
        name: of the result file where the user names none; None: the benchmark's.
    """

    raw: Mapping[str, Any]
    summary: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    failed: str = ""
    name: str | None = None


@dataclass(frozen=True)
class Option:
    """An option of the command line; see `option`."""

    name: str
    arguments: Mapping[str, Any]


def option(name: str, default: Any, help: str | None = None, **more: Any) -> Option:
    """An option with the type of its default; a list takes several values, False is a switch.

    Args:
        more: as those of ``add_argument``.
    """
    kind: dict[str, Any]
    if default is False:
        kind = {"action": "store_true"}
    elif isinstance(default, list | tuple):
        kind = {"nargs": "+", "type": type(default[0]) if default else str, "default": default}
    else:
        kind = {"type": str if default is None else type(default), "default": default}
    return Option(name, {**kind, "help": help, **more})


QUEUES = (
    option("--queue-ms", QUEUE_MS, "length of the queues of hosts and switch"),
    option("--acks-first", False, "acknowledgments do not wait behind data, as with fq_codel"),
)
"""How emulated hosts queue packets; see `queues`."""


def queues(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `QUEUES` as arguments of `EmulatedHosts`."""
    return {"acks_first": options.acks_first, "queue_ms": options.queue_ms}


def ask(
    benchmark: str,
    about: str | None,
    measure: Callable[[argparse.Namespace], Answer],
    *options: Option,
    quick: Mapping[str, Any],
    on_hosts: bool = False,
    rank: Callable[[argparse.Namespace], None] | None = None,
    check: Callable[[argparse.ArgumentParser, argparse.Namespace], None] | None = None,
    prog: str | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Reads the options, measures, and writes the result file.

    Args:
        benchmark: name in the result file.
        about: the question; its first sentence goes into the help.
        quick: options of the shortest form, which shows that all works, not how fast.
        on_hosts: needs emulated hosts.
        rank: what the module does in the ranks that it has started with `runner.ranks.run_ranks`.
        check: refuses options that do not go together.
        prog: how the command is called.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog=prog, description=(about or "").partition(" See ")[0])
    for each in options:
        parser.add_argument(each.name, **each.arguments)
    parser.add_argument("--quick", action="store_true",
                        help="the shortest form: shows that it works, not how fast")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="result file (default: out/results/BENCHMARK.json)")  # fmt: skip
    if rank is not None:
        parser.add_argument(WORKER_OPTION, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    if parsed.quick:
        vars(parsed).update(quick)
    if check is not None:
        check(parser, parsed)
    if rank is not None and parsed.worker:
        rank(parsed)
        return 0
    if on_hosts and (reason := why_not()):
        print(f"emulated hosts do not work here: {reason}", file=sys.stderr)
        return 2
    found = started()
    try:
        answer = measure(parsed)
    except (HostsUnavailable, RankFailed) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    out = parsed.out or DEFAULT_FOLDER / f"{answer.name or benchmark}.json"
    settings = {**settings_of(parsed), **answer.settings}
    write_record(benchmark, found, settings, answer.raw, answer.summary, out)
    if answer.failed:
        print(f"FAILED: {answer.failed}", file=sys.stderr)
    return 1 if answer.failed else 0
