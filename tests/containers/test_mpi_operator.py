"""The MPIJob of examples/kubernetes with containers for pods: a worker is killed and comes back.

The test does what the operator does (kubeflow/mpi-operator, v2beta1): names of pods, one key of ssh
for all, and /etc/mpi/discover_hosts.sh, which lists the running workers.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
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

STEPS, PACE_S = 160, 0.02
KILL_AT, TWO_AGAIN_AT = 60, 120
LIMIT_S = 240


class PodsOfAnMpiJob:
    """Two workers and the launcher; `operate` does what the operator would."""

    def __init__(self, podman: Podman, image: str, folder: Path) -> None:
        job = manifest("mpijob")["MPIJob"]
        self._podman, self._image = podman, image
        self._name = job["metadata"]["name"]
        roles = job["spec"]["mpiReplicaSpecs"]
        self._worker: dict[str, Any] = roles["Worker"]["template"]["spec"]
        self._launcher: dict[str, Any] = roles["Launcher"]["template"]["spec"]
        self._count: int = roles["Worker"]["replicas"]
        self._folders = {name: folder / name for name in ("code", "commits")}
        self._mpi = folder / "mpi"
        self._ssh = f"{folder / 'ssh'}:{job['spec']['sshAuthMountPath']}:ro"
        self.network = f"hvd_order_test_mpi_{os.getpid()}"
        self._running: list[int] = []

    def begin(self) -> None:
        self._podman.run("network", "create", self.network)
        for number in range(self._count):
            name = f"{self._name}-worker-{number}"
            self._podman.run(
                "run", "--detach", "--name", self._container(number), "--network", self.network,
                "--hostname", name, "--network-alias", self._host(number), "-v", self._ssh,
                *options_of(self._worker, self._folders), self._image, *command_of(self._worker),
            )  # fmt: skip
        self.operate()
        self._podman.run(
            "run", "--detach", "--name", f"{self.network}_launcher", "--network", self.network,
            "-v", self._ssh, "-v", f"{self._mpi}:/etc/mpi:ro",
            *options_of(self._launcher, self._folders), self._image, *command_of(self._launcher),
            str(STEPS), str(PACE_S), f"{TWO_AGAIN_AT}:{self._count}",
        )  # fmt: skip

    def operate(self) -> None:
        """Lists the workers that run."""
        running = [n for n in range(self._count) if self._state(self._container(n)) == "running"]
        if running != self._running:
            text = "".join(f"echo {self._host(number)}\n" for number in running)
            new = self._mpi / "new"
            new.write_text("#!/bin/sh\n" + text)
            new.chmod(0o755)
            new.rename(self._mpi / "discover_hosts.sh")
            self._running = running

    def kill_worker(self, number: int) -> None:
        self._podman.run("kill", "--signal", "KILL", self._container(number))

    def start_worker(self, number: int) -> None:
        """As its restart policy wants."""
        self._podman.run("start", self._container(number))

    def said(self) -> str:
        """By the launcher, which has the output of all ranks."""
        done = subprocess.run(
            ["podman", "logs", f"{self.network}_launcher"], env=self._podman.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.stdout

    def exit_code(self) -> int | None:
        """Of the launcher, once it has ended."""
        name = f"{self.network}_launcher"
        if self._state(name) == "running":
            return None
        return int(self._podman.run("inspect", "--format", "{{.State.ExitCode}}", name))

    def remove(self) -> None:
        for name in (f"{self.network}_launcher", *map(self._container, range(self._count))):
            self._podman.run("rm", "--force", "--ignore", "--time", "0", name)
        self._podman.run("network", "rm", "--force", self.network)

    def _container(self, number: int) -> str:
        return f"{self.network}_{number}"

    def _host(self, number: int) -> str:
        return f"{self._name}-worker-{number}.{self._name}-worker.default.svc"

    def _state(self, name: str) -> str:
        return self._podman.run("inspect", "--format", "{{.State.Status}}", name).strip()


@pytest.fixture
def pods(podman: Podman, with_ssh: str, tmp_path: Path) -> Iterator[PodsOfAnMpiJob]:
    for name in ("code", "commits", "mpi", "ssh"):
        (tmp_path / name).mkdir()
    os.chown(tmp_path / "commits", TRAINER, TRAINER)
    (tmp_path / "code/train.py").write_bytes(Path(elastic_training.__file__).read_bytes())
    key = tmp_path / "ssh/id_rsa"
    podman.call(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", key])
    (tmp_path / "ssh/authorized_keys").write_bytes(key.with_suffix(".pub").read_bytes())
    key.chmod(0o644)  # as in a volume of a Secret: of root, and readable
    tmp_path.chmod(0o755)
    pods = PodsOfAnMpiJob(podman, with_ssh, tmp_path)
    try:
        pods.begin()
        yield pods
    finally:
        pods.remove()


def wait_for(pods: PodsOfAnMpiJob, text: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while text not in (said := pods.said()):
        assert pods.exit_code() is None, said[-6000:]
        assert time.monotonic() < deadline, said[-6000:]
        pods.operate()
        time.sleep(0.2)


def test_a_killed_worker_leaves_the_job_and_joins_it_again(pods: PodsOfAnMpiJob) -> None:
    wait_for(pods, f"step {KILL_AT} loss")
    pods.kill_worker(1)
    wait_for(pods, "rank 0 of 1")
    wait_for(pods, f"waits at {TWO_AGAIN_AT}")
    pods.start_worker(1)
    wait_for(pods, "weights ")
    deadline = time.monotonic() + LIMIT_S
    while (code := pods.exit_code()) is None:
        assert time.monotonic() < deadline, pods.said()[-6000:]
        time.sleep(0.2)
    said = pods.said()
    assert code == 0, said[-6000:]
    begins = re.findall(r"rank 0 of (\d) pid \d+ begins at (\d+)", said)
    assert [size for size, _ in begins] == ["2", "1", "2"]
    assert int(begins[1][1]) >= KILL_AT - elastic_training.COMMIT_EVERY
    assert int(begins[2][1]) == TWO_AGAIN_AT
    assert_trained_right(said, STEPS)
