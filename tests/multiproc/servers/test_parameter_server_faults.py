"""Workers and servers that die, servers that come and go, while a job trains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

import psutil
import pytest
from helpers.ranks import RankPool, start_script
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
from hvd_order.engine.engine_host import engine_host

TIMEOUT_S = 60

# Trains for ever; says how far it is, and how it ended.
TRAIN = """
import sys
import hvd_order.torch as hvd
from helpers.servers import Training
from torch.optim import SGD

hvd.init()
training = Training(lambda groups: SGD(groups, lr=0.001, momentum=0.9), distributed=True)
try:
    while True:
        training.run(5)
        if training.step == 10:
            print("reached 10", flush=True)
except hvd.HorovodInternalError as error:
    print(f"raised {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""


@pytest.mark.timeout(300)
def test_a_killed_worker_is_named_and_all_end() -> None:
    with Servers(3, 1, {"HVD_ORDER_PS_UPDATE": "server"}) as servers:
        with start_script(3, TRAIN, env=servers.env) as script:
            script.wait_for_output(1, "reached 10", timeout=120)
            script.kill(1)
            ended = script.wait(timeout=TIMEOUT_S)
        for rank in (0, 2):
            assert ended[rank].returncode == 3, ended[rank].stderr
            assert "raised PeerLost: rank 1 is gone" in ended[rank].stdout
        assert servers.wait(TIMEOUT_S) == [1]
        assert "rank 1: " in servers.log()


@pytest.mark.timeout(300)
def test_servers_do_not_wait_for_a_worker_that_is_stopped() -> None:
    env = {"HVD_ORDER_PS_UPDATE": "server", "HVD_ORDER_TIMEOUT": "5"}
    with Servers(2, 1, env) as servers:
        with start_script(2, TRAIN, env=servers.env) as script:
            script.wait_for_output(1, "reached 10", timeout=120)
            script.kill(1, signal.SIGSTOP)
            script.wait_for_output(0, "raised TransferTimeout", TIMEOUT_S)
            assert "the gradients of ranks 1 have not come" in script.stdout(0)
            assert servers.wait(TIMEOUT_S) == [1]
        assert "server 0: the job has failed, and rank 1 did not leave" in servers.log()


@pytest.mark.timeout(300)
def test_a_killed_server_without_copies_is_named_with_the_cure() -> None:
    with Servers(2, 2, {"HVD_ORDER_PS_UPDATE": "server"}) as servers:
        with start_script(2, TRAIN, env=servers.env) as script:
            script.wait_for_output(0, "reached 10", timeout=120)
            script.wait_for_output(1, "reached 10", timeout=120)
            os.kill(servers.pids[0], signal.SIGKILL)
            ended = script.wait(timeout=TIMEOUT_S)
        for end in ended:
            assert end.returncode == 3, end.stderr
            assert re.search(r"raised PeerLost: server \d is gone", end.stdout), end.stdout
            assert "HVD_ORDER_PS_REPLICAS=1" in end.stdout
        first, other = servers.wait(TIMEOUT_S)
        assert first == -signal.SIGKILL
        assert other in (0, 1)


@pytest.mark.timeout(300)
def test_a_frozen_server_without_copies_is_named() -> None:
    env = {"HVD_ORDER_PS_UPDATE": "server", "HVD_ORDER_PS_SILENCE": "3"}
    with Servers(2, 1, env) as servers:
        with start_script(2, TRAIN, env=servers.env) as script:
            script.wait_for_output(0, "reached 10", timeout=120)
            script.wait_for_output(1, "reached 10", timeout=120)
            os.kill(servers.pids[0], signal.SIGSTOP)
            ended = script.wait(timeout=TIMEOUT_S / 2)
        os.kill(servers.pids[0], signal.SIGCONT)
        for end in ended:
            assert end.returncode == 3, end.stderr
            assert "raised PeerLost: server 0 is gone" in end.stdout
            assert "it does not answer: no sign of life for 3 s" in end.stdout
        assert servers.wait(TIMEOUT_S) == [1]
        assert "this process did not run for" in servers.log()


# ---------------------------------------------------------------------------- and the job goes on


def settled(servers: int) -> bool:
    """On rank 0: so many servers have links, and each of them slices."""
    transport = servers_of_job().transport
    there = set(transport.servers())
    owners = {owner for owner, _ in transport.places(max(engine_host().models))}
    return len(there) == servers and owners == there


def body_event(
    env: Mapping[str, str],
    others: Mapping[str, str],
    command: list[str],
    servers: int,
    copies: bool,
    frozen: int | None,
) -> dict[str, Any]:
    """Trains; after some steps `command` runs; goes on until so many servers have slices.

    Args:
        frozen: a process that wakes then; training goes on until it has ended.

    Returns:
        How the end differs from a training that nothing happens to, what was held, and pauses.
    """
    with job(env):
        # A model that is gone must be in nobody's way.
        Training(small_adam, distributed=True).run(5)
        disturbed = Training(small_adam, distributed=True)
        process = None
        disturbed.run(10)
        if hvd.rank() == 0:
            process = subprocess.Popen(command, env=dict(others))
        train_until(disturbed, lambda: settled(servers))
        if frozen is not None:
            if hvd.rank() == 0:
                os.kill(frozen, signal.SIGCONT)
            train_until(disturbed, lambda: psutil.Process(frozen).status() == psutil.STATUS_ZOMBIE)
        disturbed.run(20)
        hvd.barrier()

        def complete(held: dict[int, list[list[int]]]) -> bool:
            entries = [entry for entries in held.values() for entry in entries]
            slices = {entry[2] for entry in entries}
            return len(entries) == len(slices) * (1 + copies)

        held = audit(complete) if hvd.rank() == 0 else {}
        hvd.barrier()
        pushed = disturbed.step - 2  # the model was learnt in the first two
        result = {
            "apart": from_undisturbed(disturbed),
            "held": held,
            "pushed": pushed,
            "longest_s": max(disturbed.pauses[10:]),
            "usual_s": sorted(disturbed.pauses)[len(disturbed.pauses) // 2],
        }
    if process is not None and "serve" not in command:
        assert process.wait(20) == 0
    return result


def check_event(
    ranks: RankPool, event: str, count: int, after: int, env: Mapping[str, str]
) -> None:
    copies = env.get("HVD_ORDER_PS_REPLICAS") == "1"
    with Servers(ranks.size, count, {"HVD_ORDER_PS_UPDATE": "server", **env}) as servers:
        command = {
            "kill": ["kill", "-KILL", str(servers.pids[0])],
            "freeze": ["kill", "-STOP", str(servers.pids[0])],
            "remove": servers.command("servers", "remove", "0"),
            "add": servers.command("serve", "--workers", str(ranks.size)),
        }[event]
        frozen = servers.pids[0] if event == "freeze" else None
        results = ranks.run(
            body_event, servers.env, servers.environment(), command, after, copies, frozen,
            timeout=240,
        )  # fmt: skip
        codes = servers.wait()
        assert codes[1:] == [0] * (count - 1), servers.log()
        assert codes[0] == {"kill": -signal.SIGKILL, "freeze": 1}.get(event, 0), servers.log()
        if event == "freeze":
            assert "this process did not run for" in servers.log()
    print(
        f"{event}, {count} servers, {env}: longest step "
        f"{max(result['longest_s'] for result in results) * 1e3:.0f} ms, usual "
        f"{max(result['usual_s'] for result in results) * 1e3:.1f} ms"
    )
    for result in results:
        assert result["apart"] == {}, "it differs from an undisturbed run"
    held = [(server, *entry) for server, held in results[0]["held"].items() for entry in held]
    slices = sorted({entry[3] for entry in held})
    owned = [entry for entry in held if entry[4]]
    assert slices == list(range(len(slices)))
    assert sorted(entry[3] for entry in owned) == slices, "each slice has one owner"
    assert len({server for server, *_ in owned}) == after
    assert {entry[5] for entry in held} == {results[0]["pushed"]}, "each push counts once"
    if copies:
        # A copy of each on another server, and the same.
        assert len(held) == 2 * len(slices)
        assert len({entry[0:1] + entry[3:4] for entry in held}) == len(held)
        assert len({(entry[3], entry[6]) for entry in held}) == len(slices)
    else:
        assert len(held) == len(slices)


FREEZE = {"HVD_ORDER_PS_REPLICAS": "1", "HVD_ORDER_PS_SILENCE": "3"}
EVENTS = [
    ("add", 1, 2, {}),
    ("remove", 2, 1, {}),
    ("kill", 3, 2, {"HVD_ORDER_PS_REPLICAS": "1"}),
    ("freeze", 3, 2, FREEZE),
]
LONG = [
    *EVENTS,
    ("add", 2, 3, {"HVD_ORDER_PS_REPLICAS": "1"}),
    ("remove", 3, 2, {"HVD_ORDER_PS_REPLICAS": "1"}),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("event", "count", "after", "env"), EVENTS)
def test_training_goes_on_as_if_nothing_had_happened(
    two_ranks: RankPool, event: str, count: int, after: int, env: Mapping[str, str]
) -> None:
    check_event(two_ranks, event, count, after, env)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("event", "count", "after", "env"), LONG)
def test_training_goes_on_each_time(
    two_ranks: RankPool, event: str, count: int, after: int, env: Mapping[str, str]
) -> None:
    for _ in range(10):
        check_event(two_ranks, event, count, after, env)
