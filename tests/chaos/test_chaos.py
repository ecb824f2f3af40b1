"""The short form of `make chaos`: chosen runs, so that each kind of job and of fault comes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.faults.every_fault import FAULTS, Fault
from chaos.faults.process_faults import Kill, Pause
from chaos.invariants import judge
from chaos.jobs import KINDS, Job, JobPlan
from chaos.moments import Moment
from chaos.plans import draw_plan
from chaos.programs import problem
from chaos.run import Campaign, in_a_line
from helpers.ranks import REPOSITORY

sys.path.insert(0, str(REPOSITORY))
from benchmarks.hosts import why_not

SEED = 119
NUMBERS = (42, 6, 28)  # the longest first
MORE = (82, 14, 47, 8, 31, 24)  # in `make test-long`
TOGETHER = 2  # many of them only wait


@pytest.mark.timeout(600)
@pytest.mark.parametrize("numbers", [NUMBERS, pytest.param(MORE, marks=pytest.mark.long)])
def test_jobs_end_in_time_name_the_culprit_are_right_and_leave_nothing(
    numbers: Sequence[int],
) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    campaign = Campaign(SEED)
    with ThreadPoolExecutor(TOGETHER) as threads:
        records = list(threads.map(campaign.run, numbers))
    for name, lack in campaign.absent.items():
        print(f"without the fault {name!r}: {lack}")
    bad = [record for record in records if record is not None and record["violations"]]
    assert not bad, "\n\n".join(explain(record) for record in bad)


def explain(record: dict[str, Any]) -> str:
    return f"{in_a_line(record)}\n{record['tail']}\nAgain: {record['again']}"


def test_the_short_form_has_each_kind_of_job_and_of_fault() -> None:
    plans = [draw_plan(SEED, number) for number in NUMBERS + MORE]
    assert {plan.job.kind for plan in plans} == set(KINDS)
    drawn = {fault.name for plan in plans for fault in plan.faults}
    assert drawn == {fault.name for fault in FAULTS}


def test_a_run_follows_from_seed_and_number() -> None:
    for number in range(200):
        plan = draw_plan(7, number)
        assert str(plan) == str(draw_plan(7, number))
        assert str(plan) != str(draw_plan(8, number))
        assert all(fault.fits(plan.job) for fault in plan.faults)
        # Nothing can be told of a fault that follows one by which the job may have ended.
        assert not any(fault.lethal for fault in plan.faults[:-1])


# -------------------------------------------------------------------- the judge itself sees faults

PLAN = JobPlan("allreduce", 2, False, 0, 3)
NOW = Moment("steady", 0, 1, 0.0)


def ended(
    folder: Path, codes: Sequence[int], weights: dict[int, Any], said: str = "", struck: Any = ()
) -> list[str]:
    """What the judge says of a job whose ranks ended so."""
    job = Job(PLAN, folder / "job")
    job.folder.mkdir(parents=True)
    for rank, code in enumerate(codes):
        job.starts[f"rank {rank}"] = subprocess.Popen(["sh", "-c", f"exit {code}"])
        job.starts[f"rank {rank}"].wait()
    for rank, arrays in weights.items():
        np.savez(job.folder / f"weights-{rank}.npz", *arrays)
    (job.folder / "rank-0.out").write_text(said)
    for fault in struck:
        fault.struck_at = 1.0
    return judge(job, list(struck), False).violations


def test_the_judge_finds_nothing_in_a_job_that_went_on(tmp_path: Path) -> None:
    right = problem.trained(PLAN.steps)
    pause: Fault = Pause(NOW, "rank 0", 0.1)
    assert ended(tmp_path, [0, 0], {0: right, 1: right}, struck=[pause]) == []


def test_the_judge_sees_wrong_weights(tmp_path: Path) -> None:
    right = problem.trained(PLAN.steps)
    wrong = problem.trained(PLAN.steps - 1)  # an update that was lost
    (text,) = ended(tmp_path, [0, 0], {0: wrong, 1: wrong})
    assert text.startswith("silent wrong: weights differ from those of one process by")
    other = [array.copy() for array in right]
    other[0][0, 0] = np.nextafter(other[0][0, 0], 1)
    found = ended(tmp_path / "other", [0, 0], {0: right, 1: other})
    assert found == ["silent wrong: ranks ended with different weights"]


def test_the_judge_sees_an_exit_code_of_0_without_an_end(tmp_path: Path) -> None:
    found = ended(tmp_path, [0, 0], {0: problem.trained(PLAN.steps)})
    assert "silent wrong: rank 1 ended with 0, though ranks [1] did not finish" in found


def test_the_judge_wants_the_culprit_named(tmp_path: Path) -> None:
    kill: Fault = Kill(NOW, "rank 1", PLAN)
    (text,) = ended(tmp_path, [1, 1], {}, said="rank 0: somebody has died", struck=[kill])
    assert text.startswith("culprit unnamed")
    said = "PeerLost: rank 1 is gone"
    assert ended(tmp_path / "named", [1, 1], {}, said, struck=[kill]) == []


def test_the_judge_sees_a_job_that_should_have_gone_on(tmp_path: Path) -> None:
    pause: Fault = Pause(NOW, "rank 0", 0.1)
    (text,) = ended(tmp_path, [1, 0], {1: problem.trained(PLAN.steps)}, struck=[pause])
    assert text.startswith("did not go on")
