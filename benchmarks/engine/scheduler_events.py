"""How many events a second does the scheduler handle? See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.runner.question import Answer, ask
from benchmarks.runner.records.environment import ROOT

_SOURCE = Path(__file__).with_name("scheduler_events_bench.cc")


def build(tree: Path, program: Path) -> None:
    """Compiles the program with a tree's scheduler; needs a C++20 compiler alone."""
    sources = [str(_SOURCE), *map(str, sorted((tree / "csrc" / "scheduler").glob("*.cc")))]
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-O3", "-DNDEBUG", "-Wall", "-Wextra",
         "-Werror", f"-I{tree / 'csrc'}", *sources, "-o", str(program)],
        check=True,
    )  # fmt: skip


def measure(_: argparse.Namespace) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program")
        build(ROOT, program)
        done = subprocess.run([str(program)], stdout=subprocess.PIPE, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    medians = {
        f"{row['policy']}, {row['slices']} slices": statistics.median(row["rates"]) for row in rows
    }
    for name, median in medians.items():
        print(f"{name}: {median:.1f} million events a second")
    failed = "the order changed from step to step" if done.returncode else ""
    return Answer({"rows": rows}, {"million_events_per_s": medians}, failed=failed)


if __name__ == "__main__":
    sys.exit(ask("scheduler_events", __doc__, measure, quick={}))
