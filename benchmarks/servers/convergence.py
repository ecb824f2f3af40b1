"""Does asynchronous training reach the synchronous loss at equal samples? Local processes."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_JOB = "benchmarks.servers.convergence_job"
_LIMIT_S = 1800
_TARGET = 0.05


@dataclass(frozen=True)
class _Run:
    """A way to train.

    Attributes:
        knobs: settings of hvd_order.
        share: of the synchronous learning rate. Adam does not see that an asynchronous worker's
            gradient is divided by the number of workers: each push moves parameters as far as a
            synchronous round.
    """

    knobs: dict[str, str]
    share: float = 1.0


def _runs(workers: int, optimizer: str) -> dict[str, _Run]:
    asynchronous = {"HVD_ORDER_PS_MODE": "async"}
    bounded = {**asynchronous, "HVD_ORDER_PS_STALENESS": "2"}
    runs = {"synchronous": _Run({}), "asynchronous": _Run(asynchronous)}
    if optimizer != "adamw":
        return {**runs, "staleness 2": _Run(bounded)}
    return {
        **runs,
        "asynchronous, rate / workers": _Run(asynchronous, 1 / workers),
        "staleness 2, rate / workers": _Run(bounded, 1 / workers),
    }


_RATES = {"adamw": 1e-3, "sgd": 0.05}


def convergence(options: argparse.Namespace) -> dict[str, Any]:
    """Held-out loss of the demo's GPT in each mode, with the same servers and samples."""
    found: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for optimizer in options.optimizers:
        runs = _runs(options.workers, optimizer)
        losses: dict[str, list[float]] = {name: [] for name in runs}
        for seed in range(options.seeds):
            for name, run in runs.items():
                answer = _train(options, optimizer, seed, run)
                losses[name].append(answer["held_out"])
                found[f"{optimizer}, {name}, seed {seed}"] = answer
                first = statistics.fmean(answer["train"][:5])
                apart = answer["held_out"] / losses["synchronous"][seed] - 1
                print(
                    f"convergence, {optimizer}, seed {seed}, {name}: loss {first:.3f} at first, "
                    f"{answer['held_out']:.4f} on held-out text after {options.train_steps} steps "
                    f"({answer['seconds']:.0f} s), {apart:+.2%} of synchronous",
                    flush=True,
                )
        for name in runs:
            worst = max(a / s - 1 for a, s in zip(losses[name], losses["synchronous"], strict=True))
            summary[f"{optimizer}, {name}"] = worst
            verdict = "within" if worst <= _TARGET else "NOT within"
            print(f"convergence, {optimizer}, {name}: {verdict} {_TARGET:.0%} ({worst:+.2%})")
    return {"raw": found, "summary": {"worst_over_synchronous": summary}}


def _train(options: argparse.Namespace, optimizer: str, seed: int, run: _Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        job = {
            "optimizer": optimizer, "seed": seed, "steps": options.train_steps, "sequences": 2,
            "learning_rate": _RATES[optimizer] * run.share, "result": str(result),
        }  # fmt: skip
        env = {
            **{name: v for name, v in os.environ.items() if not name.startswith("HVD_ORDER_")},
            "HVD_ORDER_PS_UPDATE": "server",
            # Fixed, so that all runs train alike from the first step on.
            "HVD_ORDER_SLICE_BYTES": "512KiB",
            "OMP_NUM_THREADS": "1",
            **run.knobs,
        }
        launcher = [sys.executable, "-m", "hvd_order.tools.cli", "run", "-np", str(options.workers)]
        subprocess.run(
            [*launcher, "--servers", str(options.servers), sys.executable, "-m", _JOB,
             json.dumps(job)],
            env=env, check=True, timeout=_LIMIT_S,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(result.read_text())
    return answer
