"""Second part: real ranks on this machine; start-up, memory and threads of each."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hvd_order.launch.run import LaunchRequest, run

_WORKER = Path(__file__).with_name("worker.py")
_BYTES_A_RANK = 250 * 2**20
_SPARE_BYTES = 2**30  # for everything else on the machine
_MIB = 2**20


def measure_job(size: int, steps: int) -> dict[str, Any]:
    """Runs one job.

    Raises:
        SystemExit: a rank failed, or the machine has too little memory.
    """
    available = available_bytes()
    if available < size * _BYTES_A_RANK + _SPARE_BYTES:
        raise SystemExit(f"{size} ranks need more memory than {available / _MIB:.0f} MiB")
    with tempfile.TemporaryDirectory(prefix="hvd_order_bench_") as folder:
        command = [sys.executable, str(_WORKER), folder, str(steps)]
        begin_s = time.monotonic()
        code = run(LaunchRequest(command, size, {"OMP_NUM_THREADS": "1"}, oversubscribe=True))
        if code != 0:
            raise SystemExit(code)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    for rank in ranks:
        rank["times"] = {name: at - begin_s for name, at in rank["times"].items()}
    return {"ranks": size, "available_bytes": available, "by_rank": ranks}


def summary_of(job: dict[str, Any]) -> dict[str, Any]:
    """Times of the last rank, memory of the median rank, threads of the first and last."""
    ranks = job["by_rank"]
    last = {
        name: max(rank["times"][name] for rank in ranks)
        for name in ("imported_s", "initialized_s", "stepped_s")
    }
    memory = {
        f"{name}_bytes": statistics.median(rank["memory_bytes"][name] for rank in ranks)
        for name in ("rss", "pss", "private")
    }
    before = statistics.median(rank["imported_memory_bytes"]["private"] for rank in ranks)
    return {
        **last,
        **memory,
        "private_before_init_bytes": before,
        "rank_0_private_bytes": ranks[0]["memory_bytes"]["private"],
        "rank_0_threads": sum(ranks[0]["threads"].values()),
        "last_rank_threads": sum(ranks[-1]["threads"].values()),
        "most_threads": max(sum(rank["threads"].values()) for rank in ranks),
        "last_step_s": max(rank["step_s"][-1] for rank in ranks),
    }


def available_bytes() -> int:
    """Memory that processes can have without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise OSError("no MemAvailable in /proc/meminfo")
