"""Records what real ranks do, for `model_checker --replay`.

Starts ranks with the engine of a job and its real transport and messages, makes tensors ready at
times of their own on each rank, and writes the timelines of all ranks as one list (replay.h).

    PYTHONPATH=.:tests python tests/model_checker/record.py tests/model_checker/recordings
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from helpers.ranks import run_script

_UNIT = 64  # bytes; checker::kUnit
_SLICE_UNITS = 4096
_MARKS_A_LINE = 16

_RANK = """
import json, os, random, sys, time
import torch
import hvd_order.torch as hvd
from hvd_order._native import _torch as native
from hvd_order.engine.engine_host import engine_host

job = json.loads(sys.argv[1])
hvd.init()
rank = hvd.rank()
host = engine_host()
sizes = [units * 64 for units in job["tensors"]]
layout = native.SliceLayout(
    [(f"t{i}", size, 0) for i, size in enumerate(sizes)], host.slice_settings.slice_bytes
)
buffers = [torch.zeros(size // 4) for size in layout.buffer_bytes]
host.add_model(0, layout, buffers, job["plan"])
host.engine.start_recording()
hvd.barrier()
draw = random.Random(job["seed"] * 100 + rank)
for step in range(job["steps"]):
    tensors = list(reversed(range(len(sizes))))
    if job["shuffled"]:
        draw.shuffle(tensors)
    for tensor in tensors:
        late = rank == job["late_rank"] and tensor in job["late_tensors"]
        time.sleep(job["late_s"] if late else draw.random() * job["pause_s"])
        host.engine.tensor_ready(0, tensor)
    for tensor in range(len(sizes)):
        host.engine.wait(0, tensor)
host.engine.stop_recording()
marks = []
for event in host.engine.take_events():
    times = zip("rid", (event.ready_ns, event.issued_ns, event.done_ns))
    marks += [(at, f"{rank}{kind}{event.slice}") for kind, at in times]
print("MARKS " + json.dumps(marks))
hvd.shutdown()
"""


@dataclass
class Job:
    """What is recorded."""

    name: str
    agreement: str = "leader"
    policy: str = "priority"
    ranks: int = 2
    steps: int = 4
    credit_units: int = 2 * _SLICE_UNITS
    tensors: list[int] = field(default_factory=lambda: [_SLICE_UNITS] * 6)  # units
    plan: list[int] = field(default_factory=list)
    shuffled: bool = False  # tensors become ready in any order, not as in a backward pass
    pause_s: float = 0.001  # longest pause before a tensor
    late_rank: int = -1
    late_tensors: list[int] = field(default_factory=list)
    late_s: float = 0.0
    seed: int = 1


_PARTS = [_SLICE_UNITS, 3 * _SLICE_UNITS, 2 * _SLICE_UNITS]
_FUSED = [2 * _SLICE_UNITS, *[_SLICE_UNITS // 4] * 6]
_LATE = [0, 1, 2, 3, 4]

JOBS = [
    Job("leader_priority"),
    Job("leader_arrival", policy="arrival", shuffled=True),
    Job("leader_three_ranks", ranks=3, shuffled=True),
    Job("leader_parts_and_fused", tensors=_PARTS + _FUSED[1:]),
    Job("leader_late_rank", tensors=[_SLICE_UNITS] * 10, credit_units=_SLICE_UNITS,
        late_rank=1, late_tensors=_LATE, late_s=0.006, steps=6),
    Job("leader_heard_no_more", tensors=[_SLICE_UNITS] * 8, credit_units=_SLICE_UNITS,
        late_rank=1, late_tensors=_LATE, late_s=0.004, steps=68),
    Job("negotiated_priority", agreement="negotiated", shuffled=True),
    Job("negotiated_three_ranks", agreement="negotiated", ranks=3, shuffled=True, tensors=_FUSED),
    Job("planned", agreement="planned", policy="planned", plan=[3, 1, 5, 0, 2, 4], shuffled=True),
    Job("planned_three_ranks", agreement="planned", policy="planned", ranks=3,
        tensors=_PARTS, plan=[4, 5, 1, 3, 0, 2]),
]  # fmt: skip


def record(job: Job) -> str:
    """Runs the job. Returns the text of its recording."""
    env = {
        "HVD_ORDER_AGREEMENT": job.agreement,
        "HVD_ORDER_POLICY": "priority" if job.policy == "planned" else job.policy,
        "HVD_ORDER_SLICE_BYTES": str(_SLICE_UNITS * _UNIT),
        "HVD_ORDER_CREDIT_BYTES": str(job.credit_units * _UNIT),
    }
    marks = []
    for done in run_script(job.ranks, _RANK, json.dumps(asdict(job)), env=env):
        if done.returncode != 0:
            raise SystemExit(f"{job.name}: a rank failed:\n{done.stdout}{done.stderr}")
        lines = done.stdout.splitlines()
        marks += json.loads(next(line for line in lines if line.startswith("MARKS "))[6:])
    words = [word for _, word in sorted(marks)]
    numbers = {"tensors": job.tensors, "plan": job.plan}
    description = [
        f"{job.agreement} {job.policy} ranks {job.ranks}",
        f"credit {job.credit_units} slice {_SLICE_UNITS}",
        *(f"{key} {' '.join(map(str, values))}" for key, values in numbers.items() if values),
    ]
    lines = [" ".join(description)]
    for start in range(0, len(words), _MARKS_A_LINE):
        lines.append(" ".join(words[start : start + _MARKS_A_LINE]))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="part of a job's name")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for job in JOBS:
        if options.only in job.name:
            text = record(job)
            (options.folder / f"{job.name}.txt").write_text(text, "utf-8")
            print(job.name, len(text.split()), "words", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
