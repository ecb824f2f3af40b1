"""One rank of the second part: trains a small model, then writes what it has measured."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

BEGAN_S = time.monotonic()  # one clock for all processes of a machine

import torch  # noqa: E402

import hvd_order.torch as hvd  # noqa: E402


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    times = {"began_s": BEGAN_S, "imported_s": time.monotonic()}
    before = memory_bytes()
    hvd.init()
    times["initialized_s"] = time.monotonic()
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    batch = torch.randn(8, 256)
    step_s = []
    for step in range(steps):
        begin_s = time.monotonic()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if step == 0:
            times["stepped_s"] = time.monotonic()
        step_s.append(time.monotonic() - begin_s)
    optimizer.synchronize()
    hvd.barrier()
    found = {
        "times": times,
        "step_s": step_s,
        "memory_bytes": memory_bytes(),
        "imported_memory_bytes": before,
        "threads": threads(),
    }
    hvd.barrier()  # nobody ends while another measures
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(found))
    hvd.shutdown()


def memory_bytes() -> dict[str, int]:
    """Of this process: resident; its share of resident pages; resident pages of its own."""
    kib: Counter[str] = Counter()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        kib[name.rstrip(":")] = int(value)
    return {
        "rss": 1024 * kib["Rss"],
        "pss": 1024 * kib["Pss"],
        "private": 1024 * (kib["Private_Clean"] + kib["Private_Dirty"]),
    }


def threads() -> dict[str, int]:
    """Number of threads by name, numbers in names left out."""
    names: Counter[str] = Counter()
    for task in os.listdir("/proc/self/task"):
        names[Path(f"/proc/self/task/{task}/comm").read_text().strip().rstrip("0123456789")] += 1
    return dict(sorted(names.items()))


if __name__ == "__main__":
    main()
