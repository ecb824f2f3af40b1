"""Runs the mutants of mutants.cmake and prints how each was found: one program each, in FOLDER."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOUND = re.compile(r"^(\S+) breaks '(\w+)' after (\d+) events \((\d+) states\)", re.MULTILINE)
ROW = "{:<58} {:<10} {:>6} {:>8}  {}"


def _run(program: Path) -> subprocess.CompletedProcess[str]:
    command = [program, "--counterexample"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--traces", action="store_true", help="print the counterexamples too")
    options = parser.parse_args()
    missed = 0
    print(ROW.format("mutant", "breaks", "events", "states", "setup"))
    programs = sorted(options.folder.iterdir())
    pool = ThreadPoolExecutor(os.cpu_count())
    for program, done in zip(programs, pool.map(_run, programs), strict=True):
        found = FOUND.search(done.stdout)
        if done.returncode != 0 or found is None:
            missed += 1
            print(ROW.format(program.name, "NOT FOUND", "", "", (done.stderr or "").strip()))
            continue
        setup, broken, events, states = found.groups()
        print(ROW.format(program.name, broken, events, states, setup), flush=True)
        if options.traces:
            print(done.stdout[found.end() :])
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
