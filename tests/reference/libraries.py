"""Starts the ranks of one library and collects what they saw."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.ranks import REPOSITORY, run_script

from hvd_order.launch.horovod_rendezvous import rendezvous

__all__ = ["LIBRARIES", "Outcomes", "run_all"]

LIBRARIES = ("hvd_order", "horovod")
_PROGRAM = Path(__file__).with_name("rank_program.py")
_LIMIT_S = 240.0  # takes 10 s on two free cores

Outcomes = dict[str, dict[str, Any]]  # of one rank, by the id of the case or mistake


def run_all(library: str, size: int) -> list[Outcomes]:
    """Runs every case on `size` ranks of a library; by rank, then by the case's id.

    Raises:
        AssertionError: a rank failed; says where it was.
    """
    with tempfile.TemporaryDirectory(prefix="hvd_order_reference_") as folder:
        with _environment(library, size) as env:
            done = run_script(
                size, _PROGRAM, f"{library}.torch", folder, str(size), env=env, timeout=_LIMIT_S
            )
        for rank in done:
            where = rank.stdout[-500:]
            assert rank.returncode == 0, f"rank {rank.rank}, last:\n{where}\n{rank.stderr[-3000:]}"
        return [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(size)]


@contextlib.contextmanager
def _environment(library: str, size: int) -> Iterator[Any]:
    if library == "hvd_order":
        yield {"HVD_ORDER_TIMEOUT": "30"}
        return
    names = [f"rank{rank}" for rank in range(size)]
    workers = _horovod_workers()
    with rendezvous([f"{name}:1" for name in names]) as port:

        def env(rank: int) -> Mapping[str, str]:
            found: dict[str, str] = workers.horovod_env(
                "127.0.0.1", port, rank, size, names[rank], "lo"
            )
            return {**found, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}

        yield env


def _horovod_workers() -> Any:
    path = REPOSITORY / "benchmarks" / "runner" / "horovod_workers.py"
    spec = importlib.util.spec_from_file_location("horovod_workers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
