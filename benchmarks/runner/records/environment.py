"""On what a number was measured. Neither host names nor absolute paths are part of it."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
_SECRET = re.compile(r"SECRET|STORE|ADDR")  # values that belong to one job or one network
_IDLE_LOAD = 0.5  # average of the last minute


def environment() -> dict[str, Any]:
    """Commit, machine, command, and how busy the machine is just now; see `schema`."""
    commit, dirty = commit_of(ROOT)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": commit,
        "dirty": dirty,
        "machine": _machine(),
        "variables": {
            name: without_folders(value)
            for name, value in sorted(os.environ.items())
            if name.startswith("HVD_ORDER_") and not _SECRET.search(name)
        },
    }


def started() -> dict[str, Any]:
    """The environment of a run that begins, which is printed."""
    found = environment()
    print(describe(found) + "\n", flush=True)
    return found


def describe(found: dict[str, Any]) -> str:
    """The same in a few lines, with a warning where the machine had other work."""
    machine = found["machine"]
    changed = " with changes" if found["dirty"] else ""
    lines = [
        f"{found['date']}  commit {found['commit']}{changed}",
        f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; Linux {machine['kernel']}, Python {machine['python']}, "
        f"torch {machine['torch']}",
        *(
            [f"GPUs: {', '.join(machine['gpus'])}; CUDA {machine['cuda']}, "
             f"NCCL {machine.get('nccl')}"]
            if "gpus" in machine
            else []
        ),
        f"command: {found['command']}",
        f"load average at the start: {machine['load_average']}",
    ]  # fmt: skip
    if machine["load_average"][0] > _IDLE_LOAD:
        lines.append("WARNING: the machine was not idle; do not trust these numbers")
    return "\n".join(lines)


def without_folders(text: str) -> str:
    """The text with paths relative to the checkout; of paths elsewhere only the last part stays."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:=,'\"]+/)*([^\s/:=,'\"]+)", r"\1", text)


def _command() -> str:
    program, spec = Path(sys.argv[0]).resolve(), sys.modules["__main__"].__spec__
    if spec is not None and spec.name.startswith("benchmarks."):
        start = ["python", "-m", spec.name.removesuffix(".__main__")]
    elif program.suffix == ".py" and program.is_relative_to(ROOT):
        start = ["python", str(program.relative_to(ROOT))]
    else:
        start = [program.name]
    return without_folders(shlex.join([*start, *sys.argv[1:]]))


def _machine() -> dict[str, Any]:
    import torch  # here, since commands on emulated hosts run without PyTorch as well

    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda"] = torch.version.cuda
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, nccl_version()))
    return found


def nccl_version() -> tuple[int, int, int]:
    """Of the NCCL that is loaded; PyTorch tells the one that it was compiled with."""
    import torch

    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # linked into PyTorch
        compiled: tuple[int, int, int] = torch.cuda.nccl.version()
        return compiled
    return version.value // 10_000, version.value // 100 % 100, version.value % 100


def commit_of(tree: Path) -> tuple[str, bool]:
    """Short hash of a checkout, and whether sources or benchmarks differ from it.

    Where there is no checkout, in a container image, ``SOURCE_COMMIT`` names the commit.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(tree), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--",
                      "csrc", "hvd_order", "benchmarks/*.py")  # fmt: skip
        return git("rev-parse", "--short=12", "HEAD"), bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SOURCE_COMMIT", "unknown"), False


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
