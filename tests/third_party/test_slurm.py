"""examples/slurm under a real Slurm."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.environments.slurm_cluster import NEEDS_SLURM, Slurm, wait_until
from helpers.ranks import REPOSITORY

pytestmark = NEEDS_SLURM

TRAIN = """
import os, sys, time
import torch
import hvd_order.torch as hvd
from helpers.training.small_problem import alone, batches, equal, loss_of, new_model, weights_of

STEPS = 40
hvd.init()
model = new_model()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters())
halfway = sys.argv[1]


@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} of {hvd.size()} begins at {state.step}", flush=True)
    while state.step < STEPS:
        rows, target = batches(STEPS, hvd.rank(), hvd.size())[state.step]
        optimizer.zero_grad()
        loss_of(model(rows), target).backward()
        optimizer.step()
        state.step += 1
        state.commit()
        if state.step == STEPS // 2 and not os.path.exists(halfway + ".go"):
            open(halfway, "w").close()
            while True:  # until the signal makes commit() end this run
                time.sleep(0.1)
                state.commit()


state = hvd.elastic.TorchState(model, optimizer, step=0)
train(state)
expected = alone(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), STEPS)
print("equal" if equal(weights_of(model), expected) else "DIFFERENT", hvd.rank(), flush=True)
hvd.shutdown()
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with ExitStack() as daemons:
        yield Slurm(tmp_path, daemons)


APPTAINER = """#!/bin/bash
# In place of Apptainer, which cannot run here: runs the command as it is.
[ "$1" = exec ] || exit 3
shift
while [ "$1" != /images/hvd_order.sif ]; do echo "option $1"; shift; done
shift
export INSIDE=1
exec "$@"
"""


def test_a_job_runs_in_an_image_of_apptainer(slurm: Slurm) -> None:
    program = slurm.folder / "bin/apptainer"
    program.parent.mkdir()
    program.write_text(APPTAINER)
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    script, output = slurm.folder / "train.py", slurm.folder / "job.out"
    script.write_text("import os; print('inside', os.environ['INSIDE'], os.environ['RANK'])")
    job = slurm.call(
        "sbatch", "--parsable", "--nodes=1", f"--output={output}",
        f"--export=ALL,PATH={path},IMAGE=/images/hvd_order.sif,RANKS_PER_NODE=2",
        REPOSITORY / "examples/slurm/train.sbatch", script,
    ).strip()  # fmt: skip
    wait_until(lambda: "COMPLETED" in slurm.call("scontrol", "show", "job", job), 90, slurm.logs)
    lines = output.read_text().splitlines()
    assert sorted(line for line in lines if "inside" in line) == ["inside 1 0", "inside 1 1"]
    assert "option --bind" in lines
    assert "option --nv" not in lines


def test_a_preempted_job_goes_on_where_it_was(slurm: Slurm) -> None:
    script, halfway = slurm.folder / "train.py", slurm.folder / "halfway"
    script.write_text(TRAIN)
    output = slurm.folder / "job.out"
    job = slurm.call(
        "sbatch", "--parsable", "--nodes=1", f"--output={output}",
        REPOSITORY / "examples/slurm/train.sbatch", script, halfway,
    ).strip()  # fmt: skip
    wait_until(halfway.exists, 90, slurm.logs)
    Path(f"{halfway}.go").touch()
    slurm.call("scancel", "--batch", "--signal=TERM", job)  # as before the end of its time
    wait_until(lambda: "PENDING" in slurm.call("scontrol", "show", "job", job), 90, slurm.logs)
    # Slurm lets a job that was queued again wait for two minutes. In the second in which it ended,
    # slurmd would refuse it: "Job credential revoked".
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now+10")
    wait_until(lambda: "begins at 20" in output.read_text(), 120, slurm.logs)
    wait_until(lambda: output.read_text().count("equal ") == 2, 90, slurm.logs)
    text = output.read_text()
    assert "rank 0 of 2 begins at 0" in text
    assert "DIFFERENT" not in text
    wait_until(lambda: "COMPLETED" in slurm.call("scontrol", "show", "job", job), 30, slurm.logs)
