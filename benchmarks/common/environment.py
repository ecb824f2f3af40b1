"""On what a number was measured."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """Commit, machine, versions, command, and how busy the machine is just now."""
    script = os.path.relpath(Path(sys.argv[0]).resolve(), ROOT)
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", script, *sys.argv[1:]]),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "knobs": {k: v for k, v in sorted(os.environ.items()) if k.startswith("HVD_ORDER_")},
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda"] = torch.version.cuda
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def describe(found: dict[str, Any]) -> str:
    """The same in a few lines, with a warning where the machine had other work."""
    lines = [
        f"{found['date']}  commit {found['commit']}",
        f"{found['cpu']}, {found['usable_cores']} of {found['cores']} cores; "
        f"Linux {found['kernel']}, Python {found['python']}, torch {found['torch']}",
        *(
            [f"GPUs: {', '.join(found['gpus'])}; CUDA {found['cuda']}, NCCL {found.get('nccl')}"]
            if "gpus" in found
            else []
        ),
        f"command: {found['command']}",
        f"load average at the start: {found['load_average']}",
    ]
    if found["load_average"][0] > 0.5:
        lines.append("WARNING: the machine was not idle; do not trust these numbers")
    return "\n".join(lines)


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "csrc", "hvd_order")
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
