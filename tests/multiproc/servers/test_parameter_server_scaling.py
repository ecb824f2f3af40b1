"""Servers that come by a scale request and go by worker 0's decision; one dies as it leaves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from helpers.flags import wait_until
from helpers.ranks import RankPool
from helpers.servers import (
    Servers,
    Training,
    audit,
    from_undisturbed,
    job,
    servers_of_job,
    small_adam,
    train_until,
)

import hvd_order.torch as hvd
from hvd_order.base.errors import HorovodInternalError
from hvd_order.engine.engine_host import engine_host
from hvd_order.launch.request import LaunchRequest
from hvd_order.servers.balance.balancer import Balancer
from hvd_order.servers.launch import job_servers as launch_servers
from hvd_order.servers.launch.server_processes import ServerProcesses
from hvd_order.servers.process import coordinator
from hvd_order.servers.scaling.hint import Hint
from hvd_order.servers.scaling.policy import ScalingDecision

LIMIT_S = 60


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
            training = Training(small_adam, distributed=True)

            def over() -> bool:
                transport = servers_of_job().transport
                owners = {owner for owner, _ in transport.places(max(engine_host().models))}
                return owners == {1, 2} and set(transport.servers()) == {1, 2}

            train_until(training, over)
            training.run(20)
            mine: Any = servers_of_job().coordinator
            came = mine._scaling._policy.server_joined if hvd.rank() == 0 else []
            hvd.barrier()
            held = audit(lambda each: set(each) == {1, 2}) if hvd.rank() == 0 else {}
            hvd.barrier()
            pushed = training.step - 2  # the model was learnt in the first two
            apart = from_undisturbed(training)
            return {"came": came, "held": held, "pushed": pushed, "apart": apart}


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
    servers: Any = servers_of_job()
    model = max(engine_host().models)

    def remove() -> None:
        try:
            servers.coordinator.remove(0)
            errors.append("")
        except HorovodInternalError as error:
            errors.append(f"{type(error).__name__}: {error}")

    os.kill(pid, signal.SIGSTOP)
    removing = threading.Thread(target=remove)
    removing.start()
    wait_until(
        lambda: all(0 not in place for place in servers.transport.places(model)),
        "its slices have other places",
    )
    os.kill(pid, signal.SIGKILL)
    removing.join()


def body_lose(env: Mapping[str, str], pid: int) -> dict[str, Any]:
    errors: list[str] = []
    with job(env):
        training = Training(small_adam, distributed=True).run(10)
        if hvd.rank() == 0:
            threading.Thread(target=lose_while_leaving, args=(pid, errors), daemon=True).start()
        try:
            train_until(training, lambda: bool(errors))
            training.run(20)
        except HorovodInternalError as error:
            return {"removal": errors, "raised": f"{type(error).__name__}: {error}"}
        return {"removal": errors, "raised": "", "apart": from_undisturbed(training)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("copies", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_server_that_dies_while_it_leaves(two_ranks: RankPool, copies: bool) -> None:
    env = {"HVD_ORDER_PS_UPDATE": "server", "HVD_ORDER_PS_REPLICAS": str(int(copies))}
    with Servers(2, 2 + copies, env, in_order=True) as servers:
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
