"""PD-ORS against the best that anybody could do who knew all jobs. See README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from helpers.oracles.small_cluster import compare_with_optimum

from benchmarks.runner.question import Answer, ask, option

_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 1.0)


def measure(options: argparse.Namespace) -> Answer:
    # Each also checks capacities, prices, the dual bound, the proved ratio, and ends on time.
    shares = [compare_with_optimum(seed) for seed in range(options.instances)]
    summary = {f"{q:.0%}": float(np.quantile(shares, q)) for q in _QUANTILES}
    summary["mean"] = float(np.mean(shares))
    print(f"worth of PD-ORS over the optimum, {options.instances} instances: "
          + ", ".join(f"{name} {value:.3f}" for name, value in summary.items()))  # fmt: skip
    return Answer({"worth over the optimum": shares}, summary, name="cluster-optimum")


if __name__ == "__main__":
    sys.exit(ask("cluster", __doc__, measure, option("--instances", 1000), quick={"instances": 5}))
