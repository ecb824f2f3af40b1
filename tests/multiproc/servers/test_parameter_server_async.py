"""Asynchronous workers: every push counts once, training converges, nobody runs too far ahead."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.flags import wait_until
from helpers.ranks import RankFactory
from helpers.servers import Servers, Training, audit, job, servers_of_job
from torch.optim import SGD, Adam

import hvd_order.torch as hvd

LEARNT = 2  # steps in which the model is learnt: servers only sum, in common rounds

ASYNC = {"HVD_ORDER_PS_UPDATE": "server", "HVD_ORDER_PS_MODE": "async"}


def body_async(env: Mapping[str, str], steps: int) -> dict[str, Any]:
    with job(env):
        training = Training(lambda groups: Adam(groups, lr=0.01), distributed=True).run(steps)
        hvd.barrier()
        versions = {}
        if hvd.rank() == 0:
            versions = audit(lambda _: True)
        hvd.barrier()
        state = training.state()["optimizer"]["state"]
        return {"losses": training.losses, "audit": versions, "digest": training.digest(),
                "steps": {int(each["step"]) for each in state.values()}}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2)])
def test_every_push_counts_once(ranks: RankFactory, workers: int, servers: int) -> None:
    steps = 100
    with Servers(workers, servers, ASYNC) as job_servers:
        results = ranks(workers).run(body_async, job_servers.env, steps, timeout=200)
        assert job_servers.wait() == [0] * servers
    held = [entry for held in results[0]["audit"].values() for entry in held]
    owned = [entry for entry in held if entry[3]]
    assert sorted(entry[2] for entry in owned) == list(range(len(owned)))
    assert {entry[4] for entry in owned} == {workers * (steps - LEARNT)}
    losses = np.mean([result["losses"] for result in results], axis=0)
    assert np.mean(losses[-20:]) < 0.6 * np.mean(losses[:5])
    for result in results:
        assert result["steps"] == {LEARNT + workers * (steps - LEARNT)}


BEGUN, FINISHED = 0, 1


def await_steps(table: Any, row: int, ranks: int | slice, value: int) -> None:
    wait_until(lambda: table[row, ranks].min() >= value, f"{value} of {ranks} in {table}", 20)


def body_staleness(
    env: Mapping[str, str], path: str, bound: int | None, steps: int
) -> list[tuple[int, int]]:
    """The last rank is slow: it begins a step when the others can do no more without it.

    Returns:
        By step, how many this rank has finished, and the least that any has begun.
    """
    with job(env):
        rank, size = hvd.rank(), hvd.size()
        torch.manual_seed(0)
        model = torch.nn.Linear(32, 32)
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.001), named_parameters=model.named_parameters()
        )
        done = np.memmap(path, dtype=np.int64, mode="r+", shape=(2, size))
        seen = []
        for step in range(1 - LEARNT, steps + 1):
            if rank == size - 1 and step > 0:
                expected = steps if bound is None else min(step - 1 + bound, steps)
                await_steps(done, FINISHED, slice(rank), expected)
                time.sleep(0.02)  # time to run too far ahead
            if step > 0:
                done[BEGUN, rank] = step
            model(torch.ones(2, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.flush()
            if step > 0:
                seen.append((step, int(done[BEGUN].min())))
                done[FINISHED, rank] = step  # only now does the slow one go on
        hvd.barrier()
        return seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workers", "bound"),
    [(2, 3), (3, 0), (2, None)]
    + [pytest.param(workers, bound, marks=pytest.mark.long)
       for workers in (2, 3) for bound in (0, 1, 2, 4, 8)],
)  # fmt: skip
def test_nobody_runs_further_ahead_than_allowed(
    ranks: RankFactory, tmp_path: Path, workers: int, bound: int | None
) -> None:
    table = tmp_path / "steps"
    np.zeros((2, workers), dtype=np.int64).tofile(table)
    steps = 20
    env = ASYNC if bound is None else {**ASYNC, "HVD_ORDER_PS_STALENESS": str(bound)}
    with Servers(workers, 1, env) as servers:
        results = ranks(workers).run(body_staleness, servers.env, str(table), bound, steps)
    ahead = max(finished - begun for seen in results for finished, begun in seen)
    # Exactly: it is used as well.
    assert ahead == (steps if bound is None else bound)


def body_delay(env: Mapping[str, str], path: str, ahead: int, turns: int) -> dict[str, Any]:
    """In each turn, rank 1 has read the parameters before rank 0 takes `ahead` steps."""
    with job(env):
        rank = hvd.rank()
        torch.manual_seed(0)
        model = torch.nn.Linear(32, 32)
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.001), named_parameters=model.named_parameters()
        )
        table = np.memmap(path, dtype=np.int64, mode="r+", shape=(2, 2))

        def step(turn: int) -> None:
            loss = model(torch.ones(2, 32)).square().mean()
            if rank == 1 and turn > 0:
                table[BEGUN, 1] = turn
                await_steps(table, FINISHED, 0, turn)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.flush()

        for _ in range(LEARNT):
            step(0)
        for turn in range(1, turns + 1):
            if rank == 0:
                await_steps(table, BEGUN, 1, turn)
                for _ in range(ahead):
                    step(turn)
                table[FINISHED, 0] = turn
            else:
                step(turn)
        hvd.barrier()
        dropped = servers_of_job().transport.dropped()
        held = audit(lambda _: True) if rank == 0 else {}
        hvd.barrier()
        return {"dropped": dropped, "audit": held}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ahead", [3, 4])
def test_an_update_that_comes_too_late_is_neither_sent_nor_made(
    ranks: RankFactory, tmp_path: Path, ahead: int
) -> None:
    table = tmp_path / "turns"
    np.zeros((2, 2), dtype=np.int64).tofile(table)
    turns, bound = 3, 3
    env = {**ASYNC, "HVD_ORDER_PS_DELAY_BOUND": str(bound)}
    with Servers(2, 2, env) as servers:
        results = ranks(2).run(body_delay, servers.env, str(table), ahead, turns)
    owned = [entry for held in results[0]["audit"].values() for entry in held if entry[3]]
    in_time = ahead <= bound
    assert {entry[4] for entry in owned} == {turns * (ahead + in_time)}
    assert results[0]["dropped"] == (0, 0)
    slices, size_bytes = results[1]["dropped"]
    assert slices == (0 if in_time else turns * len(owned))
    assert (size_bytes == 0) == in_time
