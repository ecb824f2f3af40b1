"""Does everything that differs on a GPU work? Run it through benchmarks/gpu_check.sh."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from alone import check_readiness
from common.environment import describe, environment
from common.ranks import WORKER_OPTION, run_as_rank, run_ranks
from common.record import add_out_option, settings_of, write_record
from together import check_final_data, check_training

from hvd_order.c10d.job import process

TIMEOUT_S = 60  # a hang ends with an error after this


@dataclass(frozen=True)
class Check:
    """One line of the outcome.

    Attributes:
        run: called in every rank, with its device; returns a note, raises AssertionError.
        ranks: how many.
        backend: what must carry CUDA tensors; with "gloo" all ranks share the first GPU.
    """

    what: str
    run: Callable[[torch.device], str]
    ranks: int
    backend: str


CHECKS = {
    "readiness": Check(
        "a gradient is ready when its kernel has run, not when the hook fires",
        check_readiness, 1, "nccl",
    ),
    "final-data-gloo": Check(
        "the all-reduce sees what a slow kernel writes last", check_final_data, 2, "gloo"
    ),
    "training-gloo": Check(
        "2 ranks train the same weights as one process", check_training, 2, "gloo"
    ),
    "final-data-nccl": Check(
        "the all-reduce sees what a slow kernel writes last", check_final_data, 2, "nccl"
    ),
    "training-nccl": Check(
        "2 ranks train the same weights as one process", check_training, 2, "nccl"
    ),
}  # fmt: skip


def main() -> None:
    options = _options()
    if options.worker:
        run_worker(CHECKS[options.check], options)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print("SKIP  all GPU checks: torch.cuda.is_available() is False")
        return
    found = environment()
    print(describe(found))
    outcomes = {
        name: run_check(name, check, options)
        for name, check in CHECKS.items()
        if options.check in (None, name)
    }
    failed = [name for name, outcome in outcomes.items() if outcome["outcome"] == "FAIL"]
    write_record("gpu", found, settings_of(options), {"checks": outcomes}, {"failed": failed},
                 options.out)  # fmt: skip
    raise SystemExit(1 if failed else 0)


def run_check(name: str, check: Check, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one check in processes of its own, prints its line and returns its outcome."""
    title = f"{name} ({check.backend}, {check.ranks} ranks): {check.what}"
    reason = why_not(check, options)
    if reason:
        print(f"SKIP  {title}: {reason}", flush=True)
        return {"outcome": "SKIP", "reason": reason}
    begin = time.monotonic()
    arguments = ["--check", name, "--device", options.device]
    try:
        note = run_ranks(check.ranks, arguments, rank_environment(check))
    except SystemExit:
        print(f"FAIL  {title}; the error is above", flush=True)
        return {"outcome": "FAIL", "seconds": time.monotonic() - begin}
    seconds = time.monotonic() - begin
    print(f"PASS  {title}; {note} ({seconds:.0f} s)", flush=True)
    return {"outcome": "PASS", "note": note, "seconds": seconds}


def why_not(check: Check, options: argparse.Namespace) -> str | None:
    """Why a check cannot run here."""
    if options.device == "cpu":
        return "needs a GPU" if check.backend == "nccl" else None
    if check.backend == "nccl" and not torch.distributed.is_nccl_available():
        return "this PyTorch has no NCCL"
    if check.backend == "nccl" and torch.cuda.device_count() < check.ranks:
        return f"NCCL needs a GPU a rank, {torch.cuda.device_count()} found"
    return None


def rank_environment(check: Check) -> Mapping[str, str]:
    env = {"HVD_ORDER_TIMEOUT": str(TIMEOUT_S), "HVD_ORDER_STALL_WARNING": "10"}
    if check.backend == "gloo":  # the same device for all: init() then takes Gloo for it
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        env["CUDA_VISIBLE_DEVICES"] = visible or "0"
    return env


def run_worker(check: Check, options: argparse.Namespace) -> None:
    def run(device: torch.device) -> Any:
        used = process.current().backend
        nccl = "nccl" in used
        assert nccl == (check.backend == "nccl"), f"expected {check.backend}, init() took {used}"
        return check.run(device)

    if check.ranks == 1:  # hvd_order needs no process group for one rank; this check brings one
        note = check.run(torch.device(options.device, 0))
        Path(options.worker).write_text(f'"{note}"')
        return
    run_as_rank(run, options.worker, options.device)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", choices=CHECKS, help="only this one")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: to try the checks",
    )
    add_out_option(parser)
    parser.add_argument(WORKER_OPTION, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
