"""Servers that come by a scale request and go by worker 0's decision; one dies as it leaves."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool
from helpers.servers import Servers, Training, audit, job, tell_apart
from torch.optim import Adam

import hvd_order.torch as hvd
from hvd_order.base.errors import HorovodInternalError
from hvd_order.engine import engine_host
from hvd_order.launch.request import LaunchRequest
from hvd_order.servers.balance.balancer import Balancer
from hvd_order.servers.launch import job_servers as launch_servers
from hvd_order.servers.launch.server_processes import ServerProcesses
from hvd_order.servers.process import coordinator
from hvd_order.servers.scaling.hint import Hint
from hvd_order.servers.scaling.policy import ScalingDecision
from hvd_order.servers.worker import connections
from hvd_order.servers.worker.client import require_servers

LIMIT_S = 60


def make_adam(groups: Any) -> Adam:
    return Adam(groups, lr=0.001)


def servers_of_job() -> Any:
    host = engine_host.running_host()
    assert host is not None
    return require_servers(host)


def train_until(training: Training, over: Any) -> None:
    """Trains until rank 0 finds that it is ``over()``, then a little more."""
    for step in itertools.count():
        training.run(1)
        # Every rank must take as many steps.
        enough = float(hvd.rank() == 0 and over())
        if hvd.allreduce(torch.tensor(enough), op=hvd.Sum) > 0:
            break
        assert step < 20_000, "what was to happen does not"
        time.sleep(0.002)  # leaves the processors to those who come
    training.run(20)


def differences(training: Training) -> dict[str, float]:
    """From a training that nothing happened to."""
    undisturbed = Training(make_adam, distributed=True).run(training.step)
    return tell_apart(training.state(), undisturbed.state())


# -------------------------------------------------------------------------- by worker 0's decision


class Scripted:
    """Decides what a test wants, one after the other."""

    def __init__(self, _least: int, _most: int) -> None:
        self.plan = [
            Hint("scale_out", None, 2.0, 1.0),
            Hint("scale_in", 0, 1.0, 2.0),
            Hint("scale_out", None, 2.0, 1.0),
        ]
        self.acting = False
        self.server_joined: list[int | None] = []

    def step(
        self, _step_s: float, _busy_s: float, _balancer: Balancer, _servers: Collection[int]
    ) -> ScalingDecision | None:
        if self.acting or not self.plan:
            return None
        self.acting = True
        return ScalingDecision(self.plan[0], 0.0)

    def done(self, newcomer: int | None) -> None:
        self.server_joined.append(newcomer)
        del self.plan[0]
        self.acting = False

    def failed(self) -> None:
        """It is tried again: a server that has left may take a moment to end."""
        self.acting = False


def body_scripted(env: Mapping[str, str]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "ScalingPolicy", Scripted)
        with job(env):
            training = Training(make_adam, distributed=True)
            transport: Any = None

            def over() -> bool:
                nonlocal transport
                servers = servers_of_job()
                transport = servers.transport
                owners = {owner for owner, _ in transport.places(max(engine_host_models()))}
                return owners == {1, 2} and set(transport.servers()) == {1, 2}

            train_until(training, over)
            came = (
                servers_of_job().coordinator._scaling._policy.server_joined
                if hvd.rank() == 0
                else []
            )
            hvd.barrier()
            held = audit(lambda each: set(each) == {1, 2}) if hvd.rank() == 0 else {}
            hvd.barrier()
            pushed = training.step - 2  # the model was learnt in the first two
            return {
                "came": came, "held": held, "pushed": pushed, "apart": differences(training),
            }  # fmt: skip


def engine_host_models() -> set[int]:
    host = engine_host.running_host()
    assert host is not None
    return host.models


@pytest.mark.timeout(300)
def test_the_launcher_starts_servers_that_worker_0_requests(
    two_ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers: list[ServerProcesses] = []

    def noted(*arguments: Any) -> ServerProcesses:
        launchers.append(ServerProcesses(*arguments))
        return launchers[-1]

    monkeypatch.setattr(launch_servers, "ServerProcesses", noted)
    settings = {
        "HVD_ORDER_PS_UPDATE": "server", "HVD_ORDER_TIMEOUT": str(LIMIT_S),
        "HVD_ORDER_SLICE_BYTES": "256",
    }  # fmt: skip
    request = LaunchRequest(["train"], 2, env=settings, servers=1, max_servers=2)
    with launch_servers.servers_running(request) as env:
        results = two_ranks.run(body_scripted, {**settings, **env}, timeout=200)
    for result in results:
        assert result["apart"] == {}, "it differs from an undisturbed run"
    assert results[0]["came"] == [1, None, 2]
    held = [entry for entries in results[0]["held"].values() for entry in entries]
    slices = sorted(entry[2] for entry in held)
    assert slices == list(range(len(slices))), "each slice has one owner"
    assert {entry[4] for entry in held} == {results[0]["pushed"]}, "each push counts once"
    # The one that was removed has freed a place for the third, and all have ended well.
    (launcher,) = launchers
    assert [process.returncode for _, process in launcher._processes] == [0, 0, 0]


# ------------------------------------------------------------------------- lost while it is leaving


def lose_while_leaving(pid: int, errors: list[str]) -> None:
    """On rank 0: server 0 is stopped, told to leave, and dies with all it has."""
    servers = servers_of_job()
    model = max(engine_host_models())

    def remove() -> None:
        try:
            servers.coordinator.remove(0)
            errors.append("")
        except HorovodInternalError as error:
            errors.append(f"{type(error).__name__}: {error}")

    os.kill(pid, signal.SIGSTOP)
    removing = threading.Thread(target=remove)
    removing.start()
    deadline = time.monotonic() + LIMIT_S
    while any(0 in place for place in servers.transport.places(model)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    removing.join()


def body_lose(env: Mapping[str, str], pid: int) -> dict[str, Any]:
    errors: list[str] = []
    with job(env):
        training = Training(make_adam, distributed=True).run(10)
        if hvd.rank() == 0:
            threading.Thread(target=lose_while_leaving, args=(pid, errors), daemon=True).start()
        try:
            train_until(training, lambda: bool(errors))
        except HorovodInternalError as error:
            return {"removal": errors, "raised": f"{type(error).__name__}: {error}"}
        return {"removal": errors, "raised": "", "apart": differences(training)}


def start_in_order(servers: Servers, count: int) -> None:
    """So that server 0 is the first process."""
    limit = timedelta(seconds=LIMIT_S)
    meeting = connections.MeetingPoint(servers.env["HVD_ORDER_SERVER_STORE"], limit)
    for server in range(count):
        servers.start()
        connections.wait_for(meeting.own(), f"server/{server}", limit, "a server does not come")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("copies", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_server_that_dies_while_it_leaves(two_ranks: RankPool, copies: bool) -> None:
    count = 2 + copies
    env = {"HVD_ORDER_PS_UPDATE": "server", "HVD_ORDER_SERVERS": str(count)}
    with Servers(2, 0, {**env, "HVD_ORDER_PS_REPLICAS": str(int(copies))}) as servers:
        start_in_order(servers, count)
        results = two_ranks.run(body_lose, servers.env, servers.pids[0], timeout=200)
    if copies:
        for result in results:
            assert result["raised"] == ""
            assert result["apart"] == {}, "it differs from an undisturbed run"
        assert results[0]["removal"] == [""]
    else:
        for result in results:
            assert "server 0 is gone" in result["raised"]
            assert "HVD_ORDER_PS_REPLICAS=1" in result["raised"]
