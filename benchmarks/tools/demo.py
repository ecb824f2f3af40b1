"""The demo of a checkout: both systems on two emulated hosts, first measured, then training."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.hosts import EmulatedHosts, why_not
from benchmarks.runner.cells.cell import CellResult, MemoryIsShort, Setting, run_cell
from benchmarks.runner.cells.contestant import Contestant
from benchmarks.runner.cells.pictures import draw_steps
from benchmarks.runner.fleet import RankFailed
from benchmarks.runner.places import Place, emulated_hosts
from benchmarks.runner.records.environment import environment
from benchmarks.runner.records.record import settings_of, write_record
from hvd_order.planning.report.progress import ProgressBar
from hvd_order.tools.demo.train import main as train_here
from hvd_order.tools.demo.train import report, shown, training
from hvd_order.tools.demo.verdict import SHARED_CORES

_RATE_MBIT = 1000.0
_WORKER = "hvd_order.tools.demo.worker"
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # Gloo warns that emulated hosts have no names
_NAMES = {"ddp": "DDP", "hvd_order": "hvd_order"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Returns:
        0 if both systems reached the same weights, 1 if not, else what a rank ended with.
    """
    options = _options(argv)
    reason = why_not()
    if reason:
        print(f"No emulated hosts here ({reason}); training on this host alone.", flush=True)
        return train_here([*(["--quick"] if options.quick else []), "--out", str(options.out)])
    begin_s = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with (
            (options.out / "ranks.log").open("w+") as log,
            emulated_hosts(2, _RATE_MBIT, log) as place,
        ):
            same = _compare(place, options)
            assert isinstance(place.hosts, EmulatedHosts)
            code, alike = _train(place.hosts, options)
    except (RankFailed, MemoryIsShort) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if code == 0:
        print(f"\nThe picture to look at first: {options.out / 'steps.png'}")
        print(f"took {time.monotonic() - begin_s:.0f} s")
    return code or (0 if same and alike else 1)


# ------------------------------------------------------------------------------------ comparison


def _compare(place: Place, options: argparse.Namespace) -> bool:
    """Measures both systems in turns, prints the table and draws one step of each."""
    setting = Setting(
        options.model, 2, _RATE_MBIT, 1.0, rounds=1 if options.quick else 2,
        steps=2 if options.quick else 5,
    )  # fmt: skip
    print(
        f"1. {options.model} on two emulated hosts, {_RATE_MBIT:g} Mbit/s between them. Layers "
        "sleep for\n   their time on an accelerator; computation takes as long as communication.\n",
        flush=True,
    )
    first = place.fleet(restless=False)
    contestants = [Contestant("ddp", "ddp", first),
                   Contestant("hvd_order", "hvd_order", place.fleet())]  # fmt: skip
    # Building each of local steps, DDP and hvd_order, and every turn of each.
    progress = ProgressBar(4 + 3 * setting.rounds, sys.stdout)
    cell = run_cell(first, contestants, setting, _told(progress))
    progress.advance("done")
    progress.close()
    for one in contestants:
        one.fleet.close()
    print("\n".join(["", *_table(cell), "", _won(cell)]), flush=True)
    draw_steps(cell, options.out / "steps.png")
    write_record("demo", environment(), settings_of(options), {"cells": [cell.to_json()]},
                 {"cells": [cell.summary()]})  # fmt: skip
    return cell.same_weights


def _told(progress: ProgressBar) -> Callable[[str], None]:
    return lambda text: progress.advance(text.replace("ddp", "DDP"))


def _table(cell: CellResult) -> list[str]:
    rows = [("optimum of any synchronous method", cell.optimum_s, "")]
    rows += [
        (_NAMES[name], cell.systems[name].step_s, f"{100 * cell.utilisation(name):9.0f} %")
        for name in _NAMES
    ]
    lines = [f"{'':<36}{'step, s':>8}{'/ optimum':>11}{'link used':>11}"]
    return lines + [
        f"{name:<36}{step_s:>8.3f}{step_s / cell.optimum_s:>11.3f}{used:>11}"
        for name, step_s, used in rows
    ]


def _won(cell: CellResult) -> str:
    """One sentence: what was won, and why."""
    ddp, ours = cell.systems["ddp"].step_s, cell.systems["hvd_order"].step_s
    if ours >= ddp:
        return f"hvd_order's steps were {ours / ddp - 1:.0%} longer than DDP's in this short run."
    return (
        f"hvd_order's steps were {1 - ours / ddp:.0%} shorter than DDP's: it sends the gradients "
        "first that the next\nforward pass needs first, so the link also works during the forward "
        "pass."
    )


# -------------------------------------------------------------------------------------- training


def _train(hosts: EmulatedHosts, options: argparse.Namespace) -> tuple[int, bool]:
    """Trains on real text with both systems. Returns the exit code, and whether weights agree."""
    print("\n2. A small GPT learns Python's standard library on the same hosts.\n", flush=True)
    work = training(30 if options.quick else options.steps, options.out)
    command = [sys.executable, "-m", _WORKER, work.to_json()]
    ranks = [
        hosts.popen(
            rank, command, env={**os.environ, **hosts.rank_environment(rank), **shown(), **_QUIET}
        )
        for rank in range(2)
    ]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = next((code for code in codes if code), 0)
    return failed, failed == 0 and report(work, options.out, SHARED_CORES)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shows that all works, not how fast")
    parser.add_argument("--model", default="densenet121", help="emulated model (densenet121)")
    parser.add_argument("--steps", type=int, default=100, help="training steps of each system")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for results (out)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
