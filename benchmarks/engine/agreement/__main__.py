"""Which order agreement is best, and by how much? See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch

from benchmarks.engine.agreement.steps import STRAGGLERS, measure_steps
from benchmarks.runner.ranks import WORKER_OPTION, run_as_rank, run_ranks
from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from benchmarks.runner.records.report import table
from benchmarks.runner.records.summary import Summary, paired_ratio
from hvd_order.engine.job import process
from hvd_order.tools.demo.gpt import GptConfig

AGREEMENTS = ("leader", "negotiated", "planned")


def main() -> None:
    options = _options()
    if options.worker:
        run_as_rank(lambda device: measure(options, device), options.worker, "cpu")
        return
    found = started()
    results = {str(size): run_ranks(size, sys.argv[1:]) for size in options.ranks}
    show_steps(options, results)
    write_record("agreement", found, settings_of(options), {"ranks": results},
                 {"ranks": {size: summary_of(result) for size, result in results.items()}},
                 options.out)  # fmt: skip
    if not all(part["right"] for result in results.values() for part in result.values()):
        raise SystemExit("FAIL: wrong sums")


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    return {"steps": measure_steps(options, process.current().new_group("plain"))}


def summary_of(result: dict[str, Any]) -> dict[str, Any]:
    """Steps over the fluid bound."""
    return {
        "step_over_bound": {
            straggler: {
                name: paired_ratio(seconds, measured["fluid_s"]).to_json()
                for name, seconds in measured["seconds"].items()
            }
            for straggler, measured in result["steps"]["stragglers"].items()
        },
    }


def show_steps(options: argparse.Namespace, results: dict[str, Any]) -> None:
    rows = []
    for size, result in results.items():
        part = result["steps"]
        print(
            f"\nSteps on {size} ranks: {part['tensors']} tensors, {part['bytes'] / 1e6:.1f} MB in "
            f"{part['slices']} slices; saturated all-reduce {1e3 * part['wire_s']:.2f} ms, compute "
            f"{1e3 * part['compute_s']:.2f} ms, one after the other "
            f"{1e3 * part['serial_s']:.2f} ms"
        )
        for straggler in STRAGGLERS:
            measured = part["stragglers"][straggler]
            for name, seconds in measured["seconds"].items():
                summary = Summary.of([1e3 * s for s in seconds])
                added = [1e3 * (s - b) for s, b in zip(seconds, measured["fluid_s"], strict=True)]
                rows.append(
                    [
                        size,
                        straggler,
                        name,
                        f"{summary.minimum:.2f}",
                        f"{summary.median:.2f}",
                        f"{summary.p99:.2f}",
                        f"{statistics.median(added):+.2f}",
                        paired_ratio(seconds, measured["fluid_s"]),
                        f"{_efficiency(summary.median / 1e3, part):.2f}"
                        if straggler == "none"
                        else "",
                        "right" if part["right"] else "WRONG",
                    ]
                )
    print(f"\n{options.steps} steps a turn, {options.rounds} rounds after {options.warm_up} of "
          "warm-up; late rank: who has one gradient a step late by "
          f"{options.late:g} of the compute time\n")  # fmt: skip
    header = ["ranks", "late rank", "agreement", "min ms", "median ms", "p99 ms"]
    print(table([*header, "over bound ms", "x bound [95 %]", "E", "sums"], rows) + "\n")


def _efficiency(step_s: float, part: dict[str, Any]) -> float:
    """E = (U - m) / (U - L): 1 is full overlap, 0 none."""
    upper = part["serial_s"]
    lower = max(part["wire_s"], part["compute_s"])
    return float((upper - step_s) / (upper - lower))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--agreements", nargs="+", choices=AGREEMENTS, default=AGREEMENTS)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--compute", type=float, default=1.0, help="compute time / transfer time")
    parser.add_argument("--late", type=float, default=0.3, help="delay / compute time")
    parser.add_argument("--layers", type=int, default=GptConfig.layers)
    parser.add_argument("--width", type=int, default=GptConfig.width)
    add_out_option(parser)
    parser.add_argument(WORKER_OPTION, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
