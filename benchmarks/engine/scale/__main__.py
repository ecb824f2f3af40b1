"""What the order agreement costs with many ranks: in virtual time, and in real processes.

See README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engine.cpp_program import run_cpp
from benchmarks.engine.scale.processes import measure_job, summary_of
from benchmarks.engine.scale.send_cost import measure_send_cost, send_cost_s
from benchmarks.engine.scale.steps import measure_steps
from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record

PARTS = ("steps", "classes", "processes")


def main() -> None:
    options = _options()
    found = started()
    raw: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    if "steps" in options.only:
        send_s = _send_cost(options, raw)
        rows = measure_steps(options.ranks, options.networks, 1e-6 * options.latency_us, send_s)
        raw["steps"] = rows
        summary["send_s"] = send_s
        summary["added"] = _most_added(rows)
    if "classes" in options.only:
        raw["classes"] = _classes(options.ranks)
        summary["decisions_per_s"] = {
            f"{row['agreement']}, {row['ranks']} ranks, {row['role']}": statistics.median(
                row["decisions_per_s"]
            )
            for row in raw["classes"]
        }
        summary["agreement_bytes"] = {
            f"{row['agreement']}, {row['ranks']} ranks, {row['role']}": row["bytes"]
            for row in raw["classes"]
        }
    if "processes" in options.only:
        raw["processes"] = [measure_job(size, options.steps) for size in options.processes]
        summaries = {job["ranks"]: summary_of(job) for job in raw["processes"]}
        summary["processes"] = summaries
    write_record("scale", found, settings_of(options), raw, summary, options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", nargs="+", type=int,
                        default=[2, 8, 32, 128, 512, 1024, 4096],
                        help="of the first two parts")  # fmt: skip
    parser.add_argument("--networks", nargs="+", choices=["ring", "tree"], default=["ring"],
                        help="ways to all-reduce")  # fmt: skip
    parser.add_argument("--latency-us", type=float, default=25.0, help="of a message on the wire")
    parser.add_argument("--send-us", type=float,
                        help="of a message for its sender; default: measured")  # fmt: skip
    parser.add_argument("--processes", nargs="+", type=int, default=[8, 32, 64],
                        help="numbers of real ranks")  # fmt: skip
    parser.add_argument("--steps", type=int, default=20, help="of a real job")
    add_out_option(parser)
    return parser.parse_args()


def _send_cost(options: argparse.Namespace, raw: dict[str, Any]) -> float:
    if options.send_us is not None:
        return 1e-6 * float(options.send_us)
    raw["send"] = measure_send_cost()
    least = {name: min(seconds) for name, seconds in raw["send"].items()}
    print("A message of the agreement costs its sender "
          f"{1e6 * least['post_s']:.1f} us until it is posted, "
          f"{1e6 * least['processor_s']:.1f} us of processor time in all\n")  # fmt: skip
    return send_cost_s(raw["send"])


def _most_added(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By agreement and number of ranks: the largest share of a step, of all models and links."""
    most: dict[str, float] = {}
    for row in rows:
        name = f"{row['agreement']}, {row['ranks']} ranks"
        share = row["added_s"] / row["free_step_s"]
        most[name] = max(share, most.get(name, share))
    return most


def _classes(sizes: list[int]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "classes.jsonl"
        run_cpp("engine/scale/agreement_bench.cc", str(raw), *map(str, sizes)).check_returncode()
        return [json.loads(line) for line in raw.read_text().splitlines()]


if __name__ == "__main__":
    main()
