"""Runs a check in fresh ranks on a device, over a given back end; as a script it is one rank.

A check is a function of a test file of this folder that takes the device, raises AssertionError,
and may return plain values.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["CUDA", "DEVICES", "run"]

_NO_GPU = "needs a GPU: torch.cuda.is_available() is False"
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=_NO_GPU)],
)
DEVICES = ["test", CUDA]
"""The test device (tests/device) tries the checks where there is no GPU."""


def run(
    check: Callable[..., Any],
    device: str,
    *args: str,
    ranks: int = 1,
    backend: str = "",
    env: Mapping[str, str] | None = None,
    under: Sequence[str] = (),
    timeout: float = 60.0,
    killed: int | None = None,
) -> Any:
    """Runs ``check(device, *args)`` in every rank.

    Args:
        backend: what must carry CUDA tensors; "gloo": all ranks share the first GPU; "fastest":
            NCCL where it can be, else Gloo; "": nothing is carried.
        under: a program, with options, that runs the only rank.
        timeout: seconds.
        killed: the rank that must end by SIGKILL.

    Returns:
        What rank 0 returned.
    """
    from helpers.device.device_job import build
    from helpers.ranks import rank_environment, run_script

    if device == "test":
        build()
        backend = "gloo"
    nccl = torch.distributed.is_nccl_available()
    if backend == "nccl" and not nccl:
        pytest.skip("this PyTorch has no NCCL")
    if backend == "fastest":
        backend = "nccl" if nccl else "gloo"
    variables = {"HVD_ORDER_TIMEOUT": str(timeout - 10), "HVD_ORDER_STALL_WARNING": "10"}
    if backend == "gloo":  # the same device for all: init() then takes Gloo for it
        variables["CUDA_VISIBLE_DEVICES"] = (
            os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        )
    variables |= env or {}
    arguments = [device, backend, str(timeout), Path(check.__code__.co_filename).stem,
                 check.__name__, *args]  # fmt: skip
    if under:
        command = [*under, sys.executable, __file__, *arguments]
        subprocess.run(command, env=rank_environment(0, 1, 0, variables), check=True,
                       timeout=timeout)  # fmt: skip
        return None
    ended = run_script(ranks, Path(__file__), *arguments, env=variables, timeout=timeout + 15)
    for rank, one in enumerate(ended):
        assert one.returncode == (-signal.SIGKILL if rank == killed else 0), one.stderr
    return json.loads(ended[0].stdout.splitlines()[-1])


def _rank(
    kind: str, backend: str, limit_s: str, module: str, name: str, *args: str
) -> None:  # a rank of `run`
    from helpers.device.opened import open_device

    import hvd_order.torch as hvd
    from hvd_order.engine.job import process
    from hvd_order.torch.kernels import use_kernels

    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    torch.set_num_threads(1)
    many = os.environ["WORLD_SIZE"] != "1"
    device = open_device(kind, "nccl" if backend == "nccl" and many else "")
    use_kernels(device.type)
    check = getattr(importlib.import_module(f"gpu.{module}"), name)
    if many:  # one rank needs no process group; a check brings its own
        hvd.init()
        used = process.current().backend
        assert kind != "cuda" or (backend == "nccl") == ("nccl" in used), (
            f"expected {backend}, init() took {used}"
        )
    found = check(device, *args)
    if many and hvd.is_initialized():
        hvd.barrier()
        hvd.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _rank(*sys.argv[1:])
