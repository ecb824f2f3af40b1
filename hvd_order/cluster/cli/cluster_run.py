"""Options of ``hvd-order cluster run``, and what it prints."""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_order import __version__
from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.cli.network_options import as_option
from hvd_order.planning.predict.units import parse_duration
from hvd_order.planning.report.drawing import new_figure
from hvd_order.planning.report.output import (
    Output,
    add_json_option,
    add_output_options,
    write_json,
)
from hvd_order.planning.report.progress import ProgressBar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hvd_order.cluster.model.job import ClusterJob
    from hvd_order.cluster.model.machines import Machines
    from hvd_order.cluster.simulate.compare import Comparison, RunResult
    from hvd_order.cluster.simulate.outcome import JobOutcome
    from hvd_order.cluster.simulate.run_folder import RunFolder

__all__ = ["add_run_options", "run_main"]

_SYNTHETIC = "synthetic"
_JOBS, _SEEDS = 100, 5
_SLOTS, _SLOT_S = 80, 3600.0  # of synthetic jobs, if no options say others


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``hvd-order cluster run``."""
    add = parser.add_argument
    time = as_option(parse_duration)
    add("trace", metavar="TRACE", help="file of jobs, or the word synthetic: random ones")
    add("--machines", metavar="TEXT",
        help="4x8gpu, or 4xgpu:8,cpu:64+2x4gpu, or a table (default for synthetic jobs: 100 of the "
        "papers' kind)")  # fmt: skip
    add("--policy", nargs="+", default=["fifo"], metavar="NAME",
        help="one or several to compare (default: fifo)")  # fmt: skip
    add("--links", nargs="+", default=[], metavar="ORDER",
        help="jobs share the links of machines (bandwidth_gbit of --machines), in each of these "
        "orders: fair, crux, cassini; crux+buckets: transfers inside jobs as in DDP, +arrival: as "
        "they come (default: as they are needed)")  # fmt: skip
    add("--format", metavar="NAME", help="of the trace (default: as its content tells)")
    add("--jobs", type=int, metavar="N", help=f"of a synthetic trace (default: {_JOBS})")
    add("--seed", type=int, default=0, metavar="N",
        help="of the first random run (default: %(default)s)")  # fmt: skip
    add("--seeds", type=int, default=_SEEDS, metavar="N",
        help="random runs of each policy, for intervals; one where neither jobs nor policy draw "
        "(default: %(default)s)")  # fmt: skip
    add("--slot", type=time, metavar="TIME",
        help="placements change at the starts of slots: 60s, 20min, 1h (default: at any time)"
        )  # fmt: skip
    add("--until", type=time, metavar="TIME", help="end of the run (default: with the last job)")
    add("--start-cost", type=time, default=0.0, metavar="TIME",
        help="from a job's first placement to its first sample (default: 0)")  # fmt: skip
    add("--resize-cost", type=time, default=0.0, metavar="TIME",
        help="for which a job stands still when its placement changes (default: 0)")  # fmt: skip
    add("--out", type=Path, metavar="DIR",
        help="outcomes as CSV; runs that are complete there are not repeated")  # fmt: skip
    add_json_option(parser)
    add_output_options(parser)


def run_main(parsed: argparse.Namespace) -> int:
    """Prints the table, and draws the picture and writes the files that were asked for.

    Raises:
        InvalidUsage: the trace or the options make no sense; nothing has been written.
        ImportError: there is no matplotlib for the picture.
        OSError: a file cannot be read or written.
    """
    from hvd_order.cluster.report.table import comparison_report
    from hvd_order.cluster.simulate.compare import Comparison
    from hvd_order.cluster.simulate.run_folder import RunFolder
    from hvd_order.cluster.simulate.simulator import Rules

    _refuse_impossible(parsed)
    output = Output(parsed.png, parsed.html)
    if output.draws:
        new_figure(1, 1)  # that matplotlib is missing is better known before hours of simulation
    machines = _machines(parsed)
    if parsed.links and all(one.bytes_per_s == math.inf for one in machines.machines):
        raise InvalidUsage("--links, and no machine has a bandwidth; expected such as --machines "
                           "4xgpu:8,bandwidth_gbit:25")  # fmt: skip
    rules = Rules(
        parsed.slot,
        math.inf if parsed.until is None else parsed.until,
        parsed.start_cost,
        parsed.resize_cost,
        keep_placements=output.draws or parsed.out is not None,
    )
    synthetic = parsed.trace == _SYNTHETIC
    jobs = _random_jobs(parsed, machines) if synthetic else _jobs_of_file(parsed, machines)
    if parsed.links and not any(job.graph is not None for job in jobs(parsed.seed)):
        raise InvalidUsage(f"--links, and no job of {parsed.trace} says what it sends; expected a "
                           "profile, or compute_s and gradient_mb")  # fmt: skip
    seeds = range(parsed.seed, parsed.seed + parsed.seeds)
    comparison = Comparison(jobs, synthetic, machines, rules, parsed.policy, seeds, parsed.links)
    with ExitStack() as stack:
        path = parsed.out
        if path is None and output.draws:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "runs")
        folder = None if path is None else RunFolder(path, machines, _common(parsed, machines))
        results = _run_all(comparison, folder)
        if parsed.json:
            write_json({"runs": [asdict(result) for result in results]})
            return 0
        title = f"{_SYNTHETIC if synthetic else Path(parsed.trace).name}: policies compared"
        report = comparison_report(title, _facts(parsed, comparison, machines), results)
        output.write(report, lambda: _figure(title, results, folder, machines), "machines by time")
    return 0


def _refuse_impossible(parsed: argparse.Namespace) -> None:
    """Refuses numbers that make no sense, and options without effect."""
    for name, least in (("jobs", 1), ("seeds", 1), ("seed", 0)):
        value = getattr(parsed, name)
        if value is not None and value < least:
            raise InvalidUsage(f"--{name} is {value}; at least {least} is needed")
    if parsed.trace == _SYNTHETIC and parsed.format is not None:
        raise InvalidUsage("--format is for a file of jobs, and the trace is synthetic")
    if parsed.trace != _SYNTHETIC and parsed.jobs is not None:
        raise InvalidUsage("--jobs is for a synthetic trace; a file's jobs are all simulated")
    if parsed.trace != _SYNTHETIC and parsed.machines is None:
        raise InvalidUsage("no --machines; expected such as --machines 4x8gpu")


def _machines(parsed: argparse.Namespace) -> Machines:
    from hvd_order.cluster.workloads.machines import machines_from
    from hvd_order.cluster.workloads.random_jobs import paper_machines

    return paper_machines() if parsed.machines is None else machines_from(parsed.machines)


def _jobs_of_file(
    parsed: argparse.Namespace, machines: Machines
) -> Callable[[int], Iterable[ClusterJob]]:
    from hvd_order.cluster.workloads.load import check_all, load_jobs

    check_all(parsed.trace, machines, parsed.format)
    return lambda _: load_jobs(parsed.trace, parsed.format)


def _random_jobs(
    parsed: argparse.Namespace, machines: Machines
) -> Callable[[int], Iterable[ClusterJob]]:
    from hvd_order.cluster.model.job import check_job
    from hvd_order.cluster.workloads.random_jobs import random_jobs

    slot_s = parsed.slot or _SLOT_S
    slots = _SLOTS if parsed.until is None else max(int(parsed.until / slot_s), 1)

    def jobs(seed: int) -> Iterator[ClusterJob]:
        for job in random_jobs(parsed.jobs or _JOBS, seed, slots=slots, slot_s=slot_s):
            try:
                check_job(replace(job, least=job.requested), machines)
            except InvalidUsage as error:
                raise InvalidUsage(
                    f"synthetic jobs do not fit these --machines: {job.name}: {error}; they take "
                    "gpu, cpu, memory_gb and disk_gb"
                ) from None
            yield job

    return jobs


def _common(parsed: argparse.Namespace, machines: Machines) -> dict[str, str]:
    """What makes runs comparable. Policies and seeds do not belong to it: they may be added."""
    trace = _SYNTHETIC
    if parsed.trace != _SYNTHETIC:
        with open(parsed.trace, "rb") as file:
            trace = f"a file with SHA-256 {_digest(iter(lambda: file.read(1 << 20), b''))}"
    equal = _digest([repr(machines.machines).encode()])
    return {
        "hvd_order": __version__,
        "the trace": trace,
        "--format": parsed.format or "detected",
        "--jobs": str(parsed.jobs or _JOBS) if parsed.trace == _SYNTHETIC else "all",
        "--machines": f"{parsed.machines or 'default'} with SHA-256 {equal}",
        **{
            f"--{name.replace('_', '-')}": str(getattr(parsed, name))
            for name in ("slot", "until", "start_cost", "resize_cost")
        },
    }


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def _run_all(comparison: Comparison, folder: RunFolder | None) -> list[RunResult]:
    """Runs what is not complete, with a progress bar."""
    to_go = [run for run in comparison.runs if folder is None or folder.metrics(*run) is None]
    jobs = sum(comparison.jobs_of(seed) for _, seed in to_go)
    bar = ProgressBar(max(jobs, 1), sys.stderr)
    results = []
    for name, seed in comparison.runs:
        note = f"{name}, seed {seed}"

        def ended(_: JobOutcome, note: str = note) -> None:
            bar.advance(note)

        results.append(comparison.run(name, seed, folder, ended))
    if to_go:
        bar.close()
    return results


def _facts(parsed: argparse.Namespace, comparison: Comparison, machines: Machines) -> list[str]:
    totals = machines.capacity.sum(axis=0)
    amounts = ", ".join(f"{t:,.12g} {r}" for r, t in zip(machines.resources, totals, strict=True))
    jobs = f"{comparison.jobs_of(comparison.runs[0][1]):,}"
    kind = " random jobs a seed" if parsed.trace == _SYNTHETIC else " jobs"
    rules = "Placements may change at any time."
    if parsed.slot is not None:
        rules = f"Placements change at starts of slots of {parsed.slot:g} s; utilities count slots."
    if parsed.until is not None:
        rules += f" The run ends at {parsed.until:g} s."
    if parsed.links:
        rules += (" Behind +: the order in which jobs that share links send."
                  " Speeds alone are those of transfers in the order of their need.")  # fmt: skip
    costs = f" A start costs {parsed.start_cost:g} s, a change {parsed.resize_cost:g} s."
    if not parsed.start_cost and not parsed.resize_cost:
        costs = " Starts and changes cost no time."
    return [f"{jobs}{kind}; {len(machines)} machines with {amounts} in all.", rules + costs]


def _figure(
    title: str, results: Sequence[RunResult], folder: RunFolder | None, machines: Machines
) -> Figure:
    """A picture of each policy's first run."""
    assert folder is not None
    from hvd_order.cluster.report.gantt import draw_machines
    from hvd_order.cluster.report.occupancy import read_occupancy, span_of
    from hvd_order.cluster.report.table import subtitles

    first: dict[str, RunResult] = {}
    for result in results:
        first.setdefault(result.policy, result)
    files = {name: folder.placements_file(name, result.seed) for name, result in first.items()}
    span = span_of(files.values())
    return draw_machines(
        title,
        machines,
        {name: read_occupancy(file, machines, span) for name, file in files.items()},
        subtitles(first),
    )
