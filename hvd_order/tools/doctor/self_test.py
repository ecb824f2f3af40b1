"""Self-test of two ranks on this host: real processes and transport, with a timeout."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SelfTest", "clean_environment", "run_self_test"]

_RANKS = 2
_LAUNCHERS = ("OMPI_", "PMI", "SLURM_", "HOROVOD_", "HVD_ORDER_", "TORCHELASTIC")


@dataclass(frozen=True)
class SelfTest:
    """Result of a self-test.

    Attributes:
        passed: whether both ranks succeeded.
        seconds: duration, including the start of Python and PyTorch.
        cause, cure: one sentence each after a failure.
        output: end of the ranks' output after a failure.
    """

    passed: bool
    seconds: float
    cause: str = ""
    cure: str = ""
    output: str = ""


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables without those of launchers and of hvd_order, and `extra`."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return {**kept, **(extra or {})}


def run_self_test(timeout_s: float, extra: Mapping[str, str] | None = None) -> SelfTest:
    """Starts two ranks and waits for them.

    Args:
        timeout_s: seconds for all of it.
        extra: variables for the ranks.

    Returns:
        The result; all processes have ended when this returns.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvd_order_doctor_") as name:
        folder = Path(name)
        processes = [_start(rank, folder, timeout_s, extra or {}) for rank in range(_RANKS)]
        try:
            late = _wait(processes, began + timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        texts = [(folder / f"rank{rank}").read_text(errors="replace") for rank in range(_RANKS)]
    seconds = time.monotonic() - began
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    if not failed:
        return SelfTest(True, seconds)
    # Of ranks that failed by themselves; the last line of a traceback is the error.
    first = next((rank for rank in failed if rank not in late), failed[0])
    lines = texts[first].strip().splitlines()
    if first in late:
        cause = f"ranks {late} of {_RANKS} gave no answer in {timeout_s:g} s"
    else:
        last = lines[-1] if lines else f"exit code {processes[first].returncode}"
        cause = f"rank {first}: {last.removeprefix(f'[rank{first}]: ')}"
    output = "\n".join(f"rank {rank}:\n{_tail(texts[rank])}" for rank in range(_RANKS))
    return SelfTest(False, seconds, cause, _cure(cause, bool(late)), output)


def _start(
    rank: int, folder: Path, timeout_s: float, extra: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            (folder / "port").write_text(str(probe.getsockname()[1]))
    env = clean_environment(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(_RANKS),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(_RANKS),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": (folder / "port").read_text(),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            # Makes a rank report what it waits for before it is killed.
            "HVD_ORDER_TIMEOUT": str(max(1.0, timeout_s / 2)),
            **extra,
        }
    )
    with (folder / f"rank{rank}").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "hvd_order.tools.doctor.rank"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    """The ranks that were still running at the deadline."""
    late = []
    for rank, process in enumerate(processes):
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    return late


def _cure(cause: str, late: bool) -> str:
    if "ImportError" in cause or "ModuleNotFoundError" in cause:
        return "see the modules above; the message names the command that builds or installs it"
    if late or "Timeout" in cause or "connect" in cause.lower():
        return (
            "processes of this host must reach each other: look for a firewall on the loopback "
            "interface, and set GLOO_SOCKET_IFNAME to an interface that is listed above (lo)"
        )
    return "please report it, with all of this output"


def _tail(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-25:])
