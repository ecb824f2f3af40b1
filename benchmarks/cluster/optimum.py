"""PD-ORS against the best that anybody could do who knew all jobs. See README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from helpers.oracles.small_cluster import compare_with_optimum

from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record

_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_out_option(parser)
    parser.add_argument("--instances", type=int, default=1000)
    options = parser.parse_args()
    found = started()
    # Each also checks capacities, prices, the dual bound, the proved ratio, and ends on time.
    shares = [compare_with_optimum(seed) for seed in range(options.instances)]
    summary = {f"{q:.0%}": float(np.quantile(shares, q)) for q in _QUANTILES}
    summary["mean"] = float(np.mean(shares))
    print(f"worth of PD-ORS over the optimum, {options.instances} instances: "
          + ", ".join(f"{name} {value:.3f}" for name, value in summary.items()))  # fmt: skip
    write_record(
        "cluster",
        found,
        settings_of(options),
        {"worth over the optimum": shares},
        summary,
        options.out,
    )


if __name__ == "__main__":
    main()
