"""Is this tree as fast as another one, say the commit before? Runs both in turns. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.runner.records.environment import ROOT, commit_of, started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from benchmarks.runner.records.report import table
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import turns

_BENCH = "benchmarks/engine/scheduler_events_bench.cc"


def main() -> None:
    options = _options()
    found = started()
    trees = {"before": options.before.resolve(), "now": ROOT}
    commits = {name: commit_of(tree)[0] for name, tree in trees.items()}
    raw: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in options.only:
            costs = raw[benchmark] = {name: [] for name in trees}
            measure = _MEASURES[benchmark]
            for _, name in turns(list(trees), options.rounds):
                costs[name].append(measure(trees[name], Path(folder)))
                print(f"{benchmark}, {name}: {costs[name][-1]:.4g}", flush=True)
    ratios = {name: paired_ratio(each["now"], each["before"]) for name, each in raw.items()}
    print(f"\ncost now / cost before ({commits['before']}), median [95 %]\n")
    rows = [
        [name, statistics.median(raw[name]["before"]), statistics.median(raw[name]["now"]), ratio]
        for name, ratio in ratios.items()
    ]
    print(table(["benchmark", "before", "now", "now / before"], rows))
    settings = {**settings_of(options), "before": commits["before"]}
    write_record("before_after", found, settings, {"costs": raw},
                 {"ratio": {name: ratio.to_json() for name, ratio in ratios.items()}},
                 options.out)  # fmt: skip


def _overhead(tree: Path, folder: Path) -> float:
    """Step of `overhead` with hvd_order over the plain optimizer's, with the tree's package."""
    out = folder / "overhead.json"
    script = ROOT / "benchmarks" / "torch" / "overhead.py"
    env = _environment(tree)
    _run([sys.executable, str(script), "--steps", "100", "--out", str(out)], tree, env)
    ratio: float = json.loads(out.read_text())["summary"]["ratio"]["median"]
    return ratio


def _per_parameter(tree: Path, folder: Path) -> float:
    """Seconds of forward, backward and ``step()`` of 400 tiny parameters on two ranks over those of
    the plain optimizer, with the tree's package.
    """
    out = folder / "per_parameter.json"
    env = _environment(tree)
    script = ROOT / "benchmarks" / "torch" / "per_parameter.py"
    command = "hvd_order.tools.cli" if (tree / "hvd_order/tools").exists() else "hvd_order.cli"
    run = [sys.executable, "-m", command, "run", "-np", "2", sys.executable, str(script)]
    _run([*run, "--out", str(out)], tree, env)
    rounds = json.loads(out.read_text())["raw"]["rounds"]
    return statistics.median(
        sum(each["hvd_order"].values()) / sum(each["plain"].values()) for each in rounds
    )


def _throughput(tree: Path, folder: Path) -> float:
    """Seconds of slices of 1 MiB through the engine over those of plain c10d, by the tree's own
    benchmark: it uses the engine below the public interface.
    """
    out = folder / "throughput.json"
    old = tree / "benchmarks" / "throughput" / "main.py"
    start = [str(old)] if old.exists() else ["-m", "benchmarks.engine.throughput"]
    options = ["--slice-mib", "1", "--agreements", "leader", "--credit-mib", "32"]
    env = _environment(tree)
    _run([sys.executable, *start, *options, "--out", str(out)], tree, env)
    [result] = json.loads(out.read_text())["raw"]["results"]
    medians = {name: statistics.median(each) for name, each in result["seconds"].items()}
    return medians["leader"] / min(medians["plain window"], medians["plain at once"])


def _scheduler_events(tree: Path, folder: Path) -> float:
    """Microseconds an event, mean over all cells, of the tree's scheduler."""
    program = folder / f"scheduler_events_{tree.name}"
    if not program.exists():
        sources = sorted(str(path) for path in (tree / "csrc" / "scheduler").glob("*.cc"))
        _run([os.environ.get("CXX", "g++"), "-std=c++20", "-O3", "-DNDEBUG", f"-I{tree / 'csrc'}",
              str(ROOT / _BENCH), *sources, "-o", str(program)], tree)  # fmt: skip
    rates = folder / "rates.jsonl"
    rates.unlink(missing_ok=True)
    _run([str(program), str(rates)], tree)
    rows = [json.loads(line) for line in rates.read_text().splitlines()]
    return statistics.fmean(1 / statistics.median(row["rates"]) for row in rows)


_MEASURES: dict[str, Callable[[Path, Path], float]] = {
    "overhead": _overhead,
    "per_parameter": _per_parameter,
    "throughput": _throughput,
    "scheduler_events": _scheduler_events,
}


def _environment(tree: Path) -> dict[str, str]:
    """Finds the tree's package, and what benchmarks share here where the tree lacks it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)])}


def _run(command: list[str], tree: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=tree, env=env, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: a target was missed, which is no concern here
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, metavar="TREE", help="another built checkout")
    parser.add_argument("--only", nargs="+", choices=list(_MEASURES), default=list(_MEASURES))
    parser.add_argument("--rounds", type=int, default=6, help="turns of each tree")
    add_out_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
