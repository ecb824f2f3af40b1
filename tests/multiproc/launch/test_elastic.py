"""Elastic jobs as a user runs them: workers are killed, hosts come and go, training goes on."""

from __future__ import annotations

import ast
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.launching import Job, fake_ssh, launcher, launcher_environment, write_script
from helpers.processes import environment_of
from helpers.ranks import REPOSITORY, free_port
from helpers.training import elastic_training

STEPS = 240
BEGINS = r"rank (\d+) of (\d+) pid (\d+) begins at (\d+)$"
STEP = r"step (\d+) loss (\S+) at (\S+)$"


def train(pace_s: float, *sizes: str) -> list[str]:
    """The command line of the training; "20:3" waits at step 20 until there are 3 ranks."""
    return [sys.executable, elastic_training.__file__, str(STEPS), str(pace_s), *sizes]


def step_at_least(step: int) -> Callable[[re.Match[str]], bool]:
    return lambda match: int(match[1]) >= step


def assert_trained_right(job: Job) -> None:
    """Every loss and the last weights are those of training in one process, without a break."""
    losses, weights = elastic_training.reference(STEPS)
    steps = [(int(match[1]), float(match[2])) for match in job.matches(STEP)]
    assert {step for step, _ in steps} == set(range(STEPS)), job.text()
    for step, loss in steps:
        assert loss == pytest.approx(losses[step], rel=1e-9), f"step {step}\n{job.text()}"
    ended = job.matches(r"weights (.*)$")
    assert len(ended) == 1
    assert ast.literal_eval(ended[0][1]) == pytest.approx(weights, rel=1e-9)


def pids(job: Job) -> dict[int, int]:
    """Process of each rank in its latest life."""
    return {int(match[1]): int(match[3]) for match in job.matches(BEGINS)}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("victims", [[0], pytest.param([1, 0], marks=pytest.mark.long)])
def test_killed_workers_are_replaced_and_no_step_is_lost_or_done_twice(victims: list[int]) -> None:
    before = kept()
    moments = random.Random(4)
    run = launcher("-np", "3", "--min-np", "2")
    with Job([*run, *train(0.02)], launcher_environment()) as job:
        for life, victim in enumerate(victims):
            moment = 30 + 60 * life + moments.randrange(30)
            job.wait_for(STEP, step_at_least(moment))
            os.kill(pids(job)[victim], signal.SIGKILL)
            job.wait_for(rf"rank {victim} was ended by SIGKILL; starting all again")
            begin = job.wait_for(BEGINS)
            seen = max(int(match[1]) for match in job.matches(STEP))
            # The last commit is at most one interval back, and nothing before it is repeated.
            assert int(begin[2]) == 3
            assert int(begin[4]) % elastic_training.COMMIT_EVERY == 0
            assert seen - elastic_training.COMMIT_EVERY <= int(begin[4]) <= seen + 1
        assert job.wait() == 0, job.text()
    assert_trained_right(job)
    assert kept() <= before, "commits of a job that has ended must not fill the memory"


def kept() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("hvd_order_elastic")}


def torchrun(port: int, processes: int, nodes: str = "1:2") -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes,
        "--nproc-per-node", str(processes), "--max-restarts", "3", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "grows", "--local-addr", "127.0.0.1",
        "--rdzv-conf", "last_call_timeout=1",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_second_torchrun_joins_and_training_goes_on_with_three() -> None:
    # Without it torch 2.13's agents never meet in a second round (docs/guides/elastic.md).
    env = launcher_environment({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    port = free_port()
    command = train(0.0, "20:3")[1:]
    with Job([*torchrun(port, 2), *command], env) as first:
        first.wait_for("waits at 20")
        with Job([*torchrun(port, 1), *command], env) as second:
            begin = second.wait_for(BEGINS)
            assert (int(begin[2]), int(begin[4])) == (3, 20)
            assert first.wait() == 0, first.text() + second.text()
            assert second.wait() == 0, second.text()
    first.lines += second.lines  # the new agent may have become the first
    assert len(first.matches(STEP)) == STEPS, "nobody died, so nothing is done again"
    assert_trained_right(first)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_torchruns_that_have_counted_different_failures_meet_again() -> None:
    """Agents share one store for all formations, and count the failures of their own workers."""
    command = [*torchrun(free_port(), 1, nodes="2"), *train(0.02)[1:]]
    env = launcher_environment()
    with Job(command, env) as one, Job(command, env) as two:
        for moment, victim in ((30, 1), (120, 0)):
            found = {int(job.wait_for(BEGINS)[1]): job for job in (one, two)}
            found[0].wait_for(STEP, step_at_least(moment))
            os.kill(pids(found[victim])[victim], signal.SIGKILL)
        for job in (one, two):
            assert int(job.wait_for(BEGINS)[4]) >= 120 - elastic_training.COMMIT_EVERY
            assert job.wait() == 0, job.text()
    one.lines += two.lines
    assert_trained_right(one)


@pytest.mark.timeout(400)
def test_hosts_come_and_go_and_one_is_lost(tmp_path: Path) -> None:
    path, _ = fake_ssh(tmp_path)
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    run = launcher("-np", "2", "--min-np", "1", "--max-np", "3",
                   "--host-discovery-script", f"cat {hosts}")  # fmt: skip
    command = [*run, *train(0.0, "20:3", "60:2", "100:1")]
    with Job(command, launcher_environment(path)) as job:
        job.wait_for("waits at 20")
        # The agent of node1 will not have seen this failure.
        os.kill(pids(job)[1], signal.SIGKILL)
        job.wait_for("rank 1 on localhost was ended by SIGKILL; starting all again")
        job.wait_for("waits at 20")
        hosts.write_text("localhost:2\nnode1:2\n")
        assert job.wait_for(BEGINS, lambda match: match[2] == "3")[4] == "20"
        job.wait_for("waits at 60")
        os.kill(behind_ssh(job), signal.SIGKILL)  # the agent of node1
        job.wait_for("the connection to node1 broke, or its agent died")
        job.wait_for("going on without node1")
        assert job.wait_for(BEGINS, lambda match: match[2] == "2")[4] == "60"
        job.wait_for("waits at 100")
        hosts.write_text("node1:2\nlocalhost:1\n")  # node1 has failed, so it is not used again
        begin = job.wait_for(BEGINS, lambda match: match[2] == "1")
        assert begin[4] == "100"
        assert begin.string.startswith("[localhost:")
        assert job.wait() == 0, job.text()
    assert len(job.matches(STEP)) == STEPS, "all changes were at a commit, so nothing is done again"
    assert_trained_right(job)


def behind_ssh(job: Job) -> int:
    """The launcher's child that it reached by ssh."""
    for pid in children(job.pid):
        if environment_of(pid).get("SSH_CONNECTION", "").startswith("127.0.0.1"):
            return pid
    raise AssertionError("there is none")


@pytest.mark.timeout(240)
def test_a_host_that_freezes_while_the_job_forms_holds_up_nobody(tmp_path: Path) -> None:
    path, _ = fake_ssh(tmp_path)
    source = """
        import os, time
        os.write(1, f"pid {os.getpid()} of {os.environ['WORLD_SIZE']}\\n".encode())
        time.sleep(100)
    """
    run = launcher("-H", "localhost:1,node1:1", "--min-np", "1", "--elastic-timeout", "5")
    with Job([*run, *write_script(tmp_path, source)], launcher_environment(path)) as job:
        workers = [job.wait_for(r"\[(\w+):\d\] pid (\d+) of 2") for _ in range(2)]
        frozen = behind_ssh(job)
        os.kill(frozen, signal.SIGSTOP)
        here = next(int(match[2]) for match in workers if match[1] == "localhost")
        os.kill(here, signal.SIGKILL)
        try:
            job.wait_for("node1 did not answer in time", timeout=60)
            job.wait_for(r"\[localhost:0\] pid \d+ of 1", timeout=60)
        finally:
            os.kill(frozen, signal.SIGKILL)


@pytest.mark.timeout(240)
def test_a_job_whose_hosts_are_all_replaced_ends_instead_of_starting_over(tmp_path: Path) -> None:
    path, _ = fake_ssh(tmp_path)
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    command = write_script(tmp_path, "import os, time; os.write(1, b'up\\n'); time.sleep(100)")
    run = launcher("-np", "1", "--host-discovery-script", f"cat {hosts}")
    with Job([*run, *command], launcher_environment(path)) as job:
        job.wait_for("up")
        hosts.write_text("node1:1\n")
        job.wait_for("no host that has the last commit is left; keep one when hosts change")
        assert job.wait() == 1


@pytest.mark.timeout(240)
def test_a_program_that_only_fails_is_given_up(tmp_path: Path) -> None:
    command = write_script(tmp_path, "import sys; sys.exit(9)")
    with Job([*launcher("-np", "2", "--min-np", "1"), *command], launcher_environment()) as job:
        assert job.wait() == 9
    assert len(job.matches("failed with exit code 9; starting all again")) == 2
    assert job.matches("3 times in a row without a new commit in between")
    assert not re.search("Traceback", job.text())


@pytest.mark.timeout(240)
def test_the_reset_limit_ends_a_job(tmp_path: Path) -> None:
    command = write_script(tmp_path, "import sys; sys.exit(9)")
    run = launcher("-np", "1", "--min-np", "1", "--reset-limit", "1")
    with Job([*run, *command], launcher_environment()) as job:
        assert job.wait() == 9
    assert job.matches("the job has formed anew 1 times, the --reset-limit; ending it")


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_example_in_horovods_style_goes_on_after_a_kill() -> None:
    example = [sys.executable, str(REPOSITORY / "examples" / "elastic_torch.py")]
    size = ["--samples", "6400", "--epochs", "2", "--batches-per-commit", "5"]
    run = launcher("-np", "2", "--min-np", "1")
    with Job([*run, *example, *size], launcher_environment()) as job:
        job.wait_for(r"epoch 0 batch 50 workers 2")
        os.kill(worker_of(job), signal.SIGKILL)
        job.wait_for("was ended by SIGKILL; starting all again")
        assert int(job.wait_for(r"going on from commit (\d+)")[1]) >= 10
        assert job.wait() == 0, job.text()
    assert job.lines[-1] == "[0] done after 2 epochs"
    losses = [float(match[1]) for match in job.matches(r"loss (\S+)$")]
    assert losses[-1] < losses[0] / 4


def worker_of(job: Job) -> int:
    """A worker: a child of the agent, which is the launcher's only child."""
    (agent,) = children(job.pid)
    return children(agent)[0]


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
