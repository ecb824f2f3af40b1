"""How many events a second does the scheduler handle? Prints a table and writes a result file."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.engine.cpp_program import run_cpp
from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_out_option(parser)
    options = parser.parse_args()
    found = started()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "rates.jsonl"
        code = run_cpp("engine/scheduler_events_bench.cc", str(raw)).returncode
        rows = [json.loads(line) for line in raw.read_text().splitlines()]
    medians = {
        f"{row['policy']}, {row['slices']} slices": statistics.median(row["rates"]) for row in rows
    }
    write_record("scheduler_events", found, settings_of(options), {"rows": rows},
                 {"million_events_per_s": medians}, options.out)  # fmt: skip
    sys.exit(code)


if __name__ == "__main__":
    main()
