"""Does everything that differs on a GPU work, and how fast? Run it through gpu_check.sh."""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from busy import open_device
from checks import CHECKS, Check, backend_of, variables_of, why_not
from finding import Finding

import hvd_order.torch as hvd
from benchmarks.runner.ranks import WORKER_OPTION, run_ranks
from benchmarks.runner.records.environment import describe, environment
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from hvd_order.engine.job import process
from hvd_order.torch.kernels import use_kernels

_GRACE_S = 15  # a rank ends itself at its limit; a single one is killed this much later

_INTERRUPTED = 130  # of the launcher, after Ctrl-C


def main() -> None:
    options = _options()
    if options.worker:
        check = CHECKS[options.check[0]]
        faulthandler.dump_traceback_later(check.limit_s, exit=True)
        run_worker(check, options)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print("SKIP  all GPU checks: torch.cuda.is_available() is False")
        return
    if options.device == "test":
        open_device("test")  # builds it
    found = environment()
    print(describe(found))
    until = time.monotonic() + 60 * options.minutes
    outcomes = {name: run_check(name, CHECKS[name], options, until) for name in options.check}
    failed = [name for name, outcome in outcomes.items() if outcome["outcome"] == "FAIL"]
    write_record("gpu", found, settings_of(options), {"checks": outcomes}, {"failed": failed},
                 options.out)  # fmt: skip
    raise SystemExit(1 if failed else 0)


def run_check(name: str, check: Check, options: argparse.Namespace, until: float) -> dict[str, Any]:
    """Runs one check in processes of its own, prints its line and returns its outcome."""
    title = f"{name} ({check.ranks} rank{'s' if check.ranks > 1 else ''}): {check.what}"
    reason = why_not(check, options.device)
    if reason is None and time.monotonic() > until:
        reason = f"{options.minutes:g} minutes are over; --minutes allows more"
    if reason is not None:
        print(f"SKIP  {title}: {reason}", flush=True)
        return {"outcome": "SKIP", "reason": reason}
    begin = time.monotonic()
    backend = backend_of(check, options.device)
    found: dict[str, Finding] = {}
    for variant in check.variables:
        if variant == "DDP" and options.device == "test":
            continue  # it crashes on devices that it does not know
        if found and time.monotonic() > until:
            reason = f"{options.minutes:g} minutes were over before its run {variant!r}"
            print(f"SKIP  {title}: {reason}", flush=True)
            return {"outcome": "SKIP", "reason": reason}
        arguments = ["--check", name, "--variant", variant, "--device", options.device]
        variables = variables_of(check, backend, variant)
        answer = _run(check, [*arguments, "--backend", backend], variables)
        if answer is None:
            which = f" ({variant})" if variant else ""
            print(f"FAIL  {title}{which}; the error is above", flush=True)
            return {"outcome": "FAIL", "seconds": time.monotonic() - begin, "variant": variant}
        found[variant] = Finding(**answer)
    finding = check.judge(found)
    seconds = time.monotonic() - begin
    outcome = "FAIL" if finding.missed else "PASS"
    missed = f"missed: {finding.missed}; " if finding.missed else ""
    over = f", over {backend}" if backend else ""
    print(f"{outcome}  {title}; {missed}{finding.text} ({seconds:.0f} s{over})", flush=True)
    return {"outcome": outcome, "backend": backend, "seconds": seconds,
            **dataclasses.asdict(finding)}  # fmt: skip


def _run(check: Check, arguments: list[str], variables: Mapping[str, str]) -> Any:
    """What rank 0 found; None: a rank failed, and has said why."""
    if check.ranks > 1:
        try:
            return run_ranks(check.ranks, arguments, variables)
        except SystemExit as ended:
            if ended.code == _INTERRUPTED:
                raise
            return None
    with tempfile.TemporaryDirectory(prefix="hvd_order_bench_") as folder:
        path = Path(folder) / "result.json"
        command = [*check.under, sys.executable, __file__, *arguments, WORKER_OPTION, str(path)]
        try:
            ended = subprocess.run(command, env={**os.environ, **variables},
                                   timeout=check.limit_s + _GRACE_S)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            print(error)
            return None
        return json.loads(path.read_text()) if ended.returncode == 0 else None


def run_worker(check: Check, options: argparse.Namespace) -> None:
    """One rank of a check."""
    torch.set_num_threads(1)
    nccl = options.backend == "nccl"
    device = open_device(options.device, "nccl" if nccl and check.ranks > 1 else "")
    use_kernels(device.type)
    if check.ranks == 1:  # hvd_order needs no process group for one rank; a check brings its own
        finding = check.call(options.variant, device)
        Path(options.worker).write_text(json.dumps(finding.to_json()))
        return
    hvd.init()
    used = process.current().backend
    assert options.device != "cuda" or nccl == ("nccl" in used), (
        f"expected {options.backend}, init() took {used}"
    )
    finding = check.call(options.variant, device)
    if hvd.rank() == 0:
        Path(options.worker).write_text(json.dumps(finding.to_json()))
    hvd.barrier()
    hvd.shutdown()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", choices=CHECKS, nargs="+", default=list(CHECKS))
    parser.add_argument("--minutes", type=float, default=8.0, help="no check begins after")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu", "test"),
        default="cuda",
        help="cpu, and test for the device of tests/device: to try the checks",
    )
    add_out_option(parser)
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    parser.add_argument(WORKER_OPTION, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
