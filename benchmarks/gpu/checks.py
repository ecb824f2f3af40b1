"""The checks: which ranks and back end each needs, and the variables of its runs."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import equal
import steps
import torch
from alone import check_issue_cost, check_readiness
from arrays import check_arrays
from death import check_death
from driver import check_driver
from finding import Finding
from hooks import check_hooks
from kernels import check_bandwidth, check_kernels
from split import SPLIT, check_sharded, check_split
from together import check_final_data, check_training

from benchmarks.runner.device_waits import WAITS


def _only(found: Mapping[str, Finding]) -> Finding:
    return found[""]


@dataclass(frozen=True)
class Check:
    """One line of the outcome.

    Attributes:
        what: what must hold, or what is measured.
        run: called in every rank, with its device; returns a `Finding`, raises AssertionError.
            Where runs differ in the code, one for each of `variables`.
        ranks: how many.
        backend: what must carry CUDA tensors; "gloo": all ranks share the first GPU; "fastest":
            NCCL where it can be, else Gloo; "": nothing is carried.
        variables: of the environment, by run.
        judge: makes one finding of those of all runs.
        limit_s: longest time of one run.
        only_device: what it measures does not exist on the CPU.
        needs: a module that it needs.
        under: a program that runs it, with options.
    """

    what: str
    run: Callable[[torch.device], Finding] | Mapping[str, Callable[[torch.device], Finding]]
    ranks: int = 1
    backend: str = ""
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {"": {}})
    judge: Callable[[Mapping[str, Finding]], Finding] = _only
    limit_s: int = 60
    only_device: bool = False
    needs: str = ""
    under: tuple[str, ...] = ()

    def call(self, variant: str, device: torch.device) -> Finding:
        """Runs it, in a rank."""
        run = self.run if callable(self.run) else self.run[variant]
        return run(device)


_SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--tool")
_FAST = {"HVD_ORDER_TUNE": "0"}  # no trials of other settings while steps are timed
_WAITS = {name: {**_FAST, **equal.DETERMINISTIC, **way} for name, way in WAITS.items()}
_STEPS = {
    "none": ({}, steps.train_alone),
    "DDP": ({}, steps.train_ddp),
    **{name: (variables, steps.train_ours) for name, variables in WAITS.items()},
}

CHECKS = {
    "kernels": Check("the kernels give the CPU's numbers", check_kernels),
    "bandwidth": Check("rates of the kernels", check_bandwidth),
    "driver": Check("costs of calls into the driver", check_driver, only_device=True),
    "readiness": Check(
        "a gradient is ready when its kernel has run, not when the hook fires",
        check_readiness, backend="nccl", only_device=True,
    ),
    "issue": Check("what it costs to issue a slice", check_issue_cost, backend="nccl"),
    "final-data-gloo": Check(
        "the all-reduce sees what a slow kernel writes last", check_final_data, 2, "gloo"
    ),
    "final-data-nccl": Check(
        "the all-reduce sees what a slow kernel writes last", check_final_data, 2, "nccl"
    ),
    "training-gloo": Check(
        "2 ranks train the same weights as one process", check_training, 2, "gloo"
    ),
    "training-nccl": Check(
        "2 ranks train the same weights as one process", check_training, 2, "nccl"
    ),
    **{
        f"{name}-{backend}": Check(what, run, 2, backend, {"": SPLIT})
        for name, what, run in (
            ("split", "gradients are clipped and unscaled between the halves", check_split),
            ("sharded", "sharded optimizer state trains the same weights", check_sharded),
        )
        for backend in ("gloo", "nccl")
    },
    "waits": Check(
        "the weights are the same however the device is waited for", equal.train_plain, 2,
        "fastest", _WAITS, equal.judge,
    ),
    "waits-bf16_ef": Check(
        "the same with error feedback and clipping", equal.train_narrow, 2, "fastest", _WAITS,
        equal.judge,
    ),
    "hooks": Check("host time of a hook", check_hooks, 2, "fastest", {"": _FAST}),
    "steps": Check(
        "steps of a GPT of 124 M parameters in bfloat16",
        {name: run for name, (_, run) in _STEPS.items()}, 2, "fastest",
        {name: {**_FAST, **variables} for name, (variables, _) in _STEPS.items()}, steps.judge,
    ),
    "death-gloo": Check("a rank that is killed", functools.partial(check_death, backend="")),
    "death-nccl": Check(
        "a rank that is killed", functools.partial(check_death, backend="nccl"), backend="nccl",
        only_device=True,
    ),
    "cupy": Check(
        "sums of cupy's arrays on a stream of cupy's own", check_arrays, 2, "fastest",
        needs="cupy",
    ),
    "memcheck": Check(
        "the kernels under compute-sanitizer", check_kernels, limit_s=90,
        under=(*_SANITIZER, "memcheck"),
    ),
    "racecheck": Check(
        "the kernels under compute-sanitizer", check_kernels, limit_s=90,
        under=(*_SANITIZER, "racecheck"),
    ),
}  # fmt: skip


def why_not(check: Check, device: str) -> str | None:
    """Why a check cannot run here; None if it can."""
    if device != "cuda":
        nccl = check.ranks > 1 and check.backend == "nccl"
        cuda = nccl or check.needs or check.under or (check.only_device and device == "cpu")
        return "needs a GPU" if cuda else None
    if check.backend == "nccl" and not torch.distributed.is_nccl_available():
        return "this PyTorch has no NCCL"
    if check.needs and importlib.util.find_spec(check.needs) is None:
        return f"{check.needs} is not installed"
    if check.under and shutil.which(check.under[0]) is None:
        return f"{check.under[0]} is not installed"
    return None


def backend_of(check: Check, device: str) -> str:
    """What carries the tensors of a check: "nccl", "gloo", or "" if nothing does."""
    if device != "cuda":
        return "" if check.ranks == 1 else "gloo"
    if check.backend != "fastest":
        return check.backend
    return "nccl" if torch.distributed.is_nccl_available() else "gloo"


def variables_of(check: Check, backend: str, variant: str) -> dict[str, str]:
    """Variables of the environment of a run."""
    found = {"HVD_ORDER_TIMEOUT": str(check.limit_s - 10), "HVD_ORDER_STALL_WARNING": "10"}
    if backend == "gloo":  # the same device for all: init() then takes Gloo for it
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        found["CUDA_VISIBLE_DEVICES"] = visible or "0"
    return {**found, **check.variables[variant]}
