"""What do kernels, hooks, slices and steps cost on a GPU? See README.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "tests"))
from helpers.device import test_device
from helpers.device.device_waits import WAITS
from helpers.device.opened import open_device

from benchmarks.engine.gpu import steps
from benchmarks.engine.gpu.bandwidth import check_bandwidth
from benchmarks.engine.gpu.finding import Finding
from benchmarks.engine.gpu.hooks import check_hooks
from benchmarks.engine.gpu.issue import check_issue_cost
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.ranks import run_as_rank, run_ranks
from hvd_order.torch.kernels import use_kernels

Ask = Callable[[torch.device], Finding]
_FAST = {"HVD_ORDER_TUNE": "0", "HVD_ORDER_TIMEOUT": "50"}  # no trials of other settings
_TWO_RANKS: Mapping[str, tuple[Ask, Mapping[str, str]]] = {
    "hooks": (check_hooks, {}),
    "none": (steps.train_alone, {}),
    "DDP": (steps.train_ddp, {}),
    **{name: (steps.train_ours, way) for name, way in WAITS.items()},
}
_ONE_RANK: Mapping[str, Ask] = {
    "bandwidth": check_bandwidth, "issue": check_issue_cost,
}  # fmt: skip
_STEPS = [name for name in _TWO_RANKS if name != "hooks"]
CHECKS = (*_ONE_RANK, "hooks", "steps")


def measure(options: argparse.Namespace) -> Answer:
    if options.device == "test":
        test_device.load()  # builds it
    outcomes = {name: _outcome(name, options.device) for name in options.check}
    missed = [name for name, outcome in outcomes.items() if outcome["outcome"] == "FAIL"]
    return Answer({"checks": outcomes}, {"failed": missed}, failed=", ".join(missed))


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        print("SKIP  speed on a GPU: torch.cuda.is_available() is False")
        parser.exit()


def _outcome(name: str, device: str) -> dict[str, Any]:
    """Asks in ranks of its own, prints a line and returns the outcome."""
    nccl = device == "cuda" and torch.distributed.is_nccl_available()
    backend = "nccl" if nccl else "gloo"
    asked = _STEPS if name == "steps" else [name]
    if device == "test":
        asked = [each for each in asked if each != "DDP"]  # it crashes on devices it does not know
    answers = {}
    for each in asked:
        variables = {**_FAST, **(_TWO_RANKS[each][1] if each in _TWO_RANKS else {})}
        if not nccl:
            variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")[:1]
        arguments = ["--check", each, "--device", device, "--backend", backend]
        answers[each] = Finding(**run_ranks(2 if each in _TWO_RANKS else 1, arguments, variables))
    finding = steps.judge(answers) if name == "steps" else answers[name]
    outcome = "FAIL" if finding.missed else "PASS"
    missed = f"missed: {finding.missed}; " if finding.missed else ""
    print(f"{outcome}  {name}: {missed}{finding.text} (over {backend})", flush=True)
    return {"outcome": outcome, "backend": backend, **finding.to_json()}


def _rank(options: argparse.Namespace) -> None:
    (name,) = options.check
    if name in _ONE_RANK:  # no process group: the question brings its own
        torch.set_num_threads(1)
        device = open_device(options.device)
        use_kernels(device.type)
        Path(options.worker).write_text(json.dumps(_ONE_RANK[name](device).to_json()))
        return
    device = open_device(options.device, "nccl" if options.backend == "nccl" else "")
    use_kernels(device.type)
    run_as_rank(lambda _: _TWO_RANKS[name][0](device).to_json(), options.worker, "cpu")


if __name__ == "__main__":
    sys.exit(ask(
        "gpu", __doc__, measure,
        option("--check", list(CHECKS), choices=[*CHECKS, *_STEPS]),
        option("--device", "cuda", "test: the device of tests/device, to try it",
               choices=("cuda", "test")),
        option("--backend", "", argparse.SUPPRESS),
        rank=_rank, check=_check, quick={"check": ["hooks"]},
    ))  # fmt: skip
