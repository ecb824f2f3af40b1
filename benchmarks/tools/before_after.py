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
from typing import Any

from benchmarks.engine.scheduler_events import build
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.records.environment import ROOT, commit_of
from benchmarks.runner.records.report import table
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import take_turns


def measure(options: argparse.Namespace) -> Answer:
    trees = {"before": options.before.resolve(), "now": ROOT}
    raw: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        places = {name: Path(folder, name) for name in trees}
        for place in places.values():
            place.mkdir()
        for benchmark in options.only:

            def cost(name: str, benchmark: str = benchmark) -> list[float]:
                found = _COSTS[benchmark](trees[name], places[name])
                print(f"{benchmark}, {name}: {found:.4g}", flush=True)
                return [found]

            raw[benchmark] = take_turns(trees, cost, options.rounds)
    before = commit_of(trees["before"])[0]
    ratios = {name: paired_ratio(each["now"], each["before"]) for name, each in raw.items()}
    print(f"\ncost now / cost before ({before}), median [95 %]\n")
    rows = [
        [name, statistics.median(raw[name]["before"]), statistics.median(raw[name]["now"]), ratio]
        for name, ratio in ratios.items()
    ]
    print(*table(["benchmark", "before", "now", "now / before"], rows), sep="\n")
    summary = {"ratio": {name: ratio.to_json() for name, ratio in ratios.items()}}
    return Answer({"costs": raw}, summary, {"before": before})


def _overhead(tree: Path, folder: Path) -> float:
    """Step of `overhead` with hvd_order over the plain optimizer's, with the tree's package."""
    found = _answer("overhead", tree, folder, "--steps", "100")
    ratio: float = found["summary"]["ratio"]["median"]
    return ratio


def _per_parameter(tree: Path, folder: Path) -> float:
    """Seconds of forward, backward and ``step()`` of 400 tiny parameters on two ranks over those of
    the plain optimizer, with the tree's package.
    """
    return statistics.median(
        sum(each["hvd_order"].values()) / sum(each["plain"].values())
        for each in _answer("per_parameter", tree, folder)["raw"]["rounds"]
    )


def _throughput(tree: Path, folder: Path) -> float:
    """Seconds of slices of 1 MiB through the engine over those of plain c10d, by the tree's own
    benchmark: it uses the engine below the public interface.
    """
    out = folder / "throughput.json"
    start = ["-m", "benchmarks.engine.throughput"]
    options = ["--slice-mib", "1", "--agreements", "leader", "--credit-mib", "32"]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    _run([sys.executable, *start, *options, "--out", str(out)], tree, env)
    [result] = json.loads(out.read_text())["raw"]["results"]
    medians = {name: statistics.median(each) for name, each in result["seconds"].items()}
    return medians["leader"] / min(medians["plain window"], medians["plain at once"])


def _scheduler_events(tree: Path, folder: Path) -> float:
    """Microseconds an event, mean over all cells, of the tree's scheduler."""
    program = folder / "scheduler_events"
    if not program.exists():
        build(tree, program)
    rows = [json.loads(line) for line in _run([str(program)], tree).splitlines()]
    return statistics.fmean(1 / statistics.median(row["rates"]) for row in rows)


_COSTS: dict[str, Callable[[Path, Path], float]] = {
    "overhead": _overhead,
    "per_parameter": _per_parameter,
    "throughput": _throughput,
    "scheduler_events": _scheduler_events,
}


def _answer(question: str, tree: Path, folder: Path, *options: str) -> Any:
    """The result file of a question of this tree, asked of the tree's package."""
    package = folder / "hvd_order"
    if not package.exists():
        package.symlink_to(tree / "hvd_order")
    out = folder / f"{question}.json"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    script = ROOT / "benchmarks" / "torch" / f"{question}.py"
    _run([sys.executable, str(script), *options, "--out", str(out)], tree, env)
    return json.loads(out.read_text())


def _run(command: list[str], tree: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=tree, env=env, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: a target was missed, which is no concern here
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(ask(
        "before_after", __doc__, measure,
        option("before", None, "another built checkout", type=Path, metavar="TREE"),
        option("--only", list(_COSTS), choices=list(_COSTS)),
        option("--rounds", 6, "turns of each tree"),
        quick={"rounds": 1},
    ))  # fmt: skip
