"""The job of examples/kubernetes with containers for pods: each is killed, and training goes on.

A Job starts another pod with the number of one that failed. That is all that the test does of
Kubernetes; command, arguments, variables and volumes are the manifest's.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.environments.podman import NEEDS_PODMAN, Podman
from helpers.environments.pods import (
    TRAINER,
    assert_trained_right,
    command_of,
    manifest,
    options_of,
)
from helpers.training import elastic_training

pytestmark = NEEDS_PODMAN

STEPS, PACE_S = 400, 0.02
LIMIT_S = 240


class PodsOfAJob:
    """The pods of the manifest; one that fails is followed by another with its number."""

    def __init__(self, podman: Podman, image: str, commits: Path, script: Path) -> None:
        documents = manifest("job")
        service, job = documents["Service"], documents["Job"]
        self._podman = podman
        self._image = image
        self._domain = service["metadata"]["name"]
        self._name = job["metadata"]["name"]
        self._pod: dict[str, Any] = job["spec"]["template"]["spec"]
        self._folders = {"code": script.parent, "commits": commits}
        self.count: int = job["spec"]["completions"]
        self.network = f"hvd_order_test_{self._name}_{os.getpid()}"
        self._lives = [0] * self.count

    def begin(self) -> None:
        self._podman.run("network", "create", self.network)
        for number in range(self.count):
            self.start(number)

    def container(self, number: int) -> str:
        """The container of the pod's present life."""
        return f"{self.network}_{number}_{self._lives[number]}"

    def start(self, number: int) -> None:
        # Kubernetes' name of the pod, which pods also have for themselves.
        name = f"{self._name}-{number}.{self._domain}"
        options = ["--detach", "--name", self.container(number), "--network", self.network,
                   "--hostname", name, "--network-alias", name,
                   *options_of(self._pod, self._folders)]  # fmt: skip
        self._podman.run(
            "run", *options, self._image, *command_of(self._pod), str(STEPS), str(PACE_S)
        )

    def kill(self, number: int) -> None:
        self._podman.run("kill", "--signal", "KILL", self.container(number))

    def replace_failed(self) -> bool:
        """Starts what a Job would; returns whether all pods have succeeded."""
        succeeded = 0
        for number in range(self.count):
            state, code = self._podman.run(
                "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}",
                self.container(number),
            ).split()  # fmt: skip
            if state == "exited" and code != "0":
                self._lives[number] += 1
                self.start(number)
            succeeded += state == "exited" and code == "0"
        return succeeded == self.count

    def said(self) -> str:
        """By all pods so far, one after the other."""
        return "\n".join(
            subprocess.run(
                ["podman", "logs", f"{self.network}_{number}_{life}"],
                env=self._podman.environment, capture_output=True, text=True, check=False,
            ).stdout
            for number in range(self.count)
            for life in range(self._lives[number] + 1)
        )  # fmt: skip

    def remove(self) -> None:
        for number in range(self.count):
            for life in range(self._lives[number] + 1):
                name = f"{self.network}_{number}_{life}"
                self._podman.run("rm", "--force", "--ignore", "--time", "0", name)
        self._podman.run("network", "rm", "--force", self.network)


@pytest.fixture
def pods(podman: Podman, runtime: str, tmp_path: Path) -> Iterator[PodsOfAJob]:
    commits, code = tmp_path / "commits", tmp_path / "code"
    commits.mkdir()
    os.chown(commits, TRAINER, TRAINER)
    code.mkdir()
    script = code / "train.py"
    script.write_bytes(Path(elastic_training.__file__).read_bytes())
    tmp_path.chmod(0o755)
    pods = PodsOfAJob(podman, runtime, commits, script)
    try:
        pods.begin()
        yield pods
    finally:
        pods.remove()


def wait_until(pods: PodsOfAJob, done: Callable[[str, bool], bool]) -> str:
    """Replaces failed pods until what they said, and whether all succeeded, is enough."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        succeeded = pods.replace_failed()
        said = pods.said()
        if done(said, succeeded):
            return said
        assert time.monotonic() < deadline, said[-6000:]
        time.sleep(0.2)


def begins_in(said: str) -> list[int]:
    """The step at which each rank began, in each of its lives."""
    return sorted(int(step) for step in re.findall(r"rank \d+ of 2 pid \d+ begins at (\d+)", said))


def test_killed_pods_are_replaced_and_training_goes_on_from_the_commit(pods: PodsOfAJob) -> None:
    for moment, victim in ((60, 1), (180, 0)):  # pod 0 has the store at which the others meet
        before = wait_until(pods, lambda said, _, step=moment: f"step {step} loss" in said)
        pods.kill(victim)
        lives = len(begins_in(before)) + 2
        wait_until(pods, lambda said, _, enough=lives: len(begins_in(said)) >= enough)
    said = wait_until(pods, lambda _, succeeded: succeeded)
    begins = begins_in(said)
    assert begins[:2] == [0, 0]
    assert begins[2] >= 60 - elastic_training.COMMIT_EVERY
    assert begins[4] >= 180 - elastic_training.COMMIT_EVERY
    assert_trained_right(said, STEPS)
