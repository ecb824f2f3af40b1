"""Servers add updates up for one another: each counts once, also if a server is lost meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers.ranks import RankFactory
from helpers.servers import Servers, audit, job, servers_of_job
from torch.optim import SGD

import hvd_order.torch as hvd

LEARNT = 2  # steps in which servers only sum
WIDTH = 16384
LR = 0.25
ENV = {
    "HVD_ORDER_PS_UPDATE": "server",
    "HVD_ORDER_PS_MODE": "async",
    "HVD_ORDER_PS_DELAY_BOUND": "1000",
    "HVD_ORDER_PS_AGGREGATE": "1",
    "HVD_ORDER_SLICE_BYTES": "4096",
}


def slope(rank: int, step: int) -> torch.Tensor:
    """Whole numbers, so sums are exact in any order."""
    numbers = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-4, 5, (WIDTH,), generator=numbers).float()


def body_aggregated(
    env: Mapping[str, str], steps: int, kill: tuple[int, int] | None
) -> dict[str, Any]:
    """Gradients do not depend on parameters, so the end does not on the order of updates.

    Args:
        kill: a process id, and the step after which rank 0 kills it.
    """
    with job(env):
        rank, size = hvd.rank(), hvd.size()
        weights = torch.nn.Parameter(torch.zeros(WIDTH))
        optimizer: Any = hvd.DistributedOptimizer(
            SGD([weights], lr=LR), named_parameters=[("weights", weights)]
        )
        for step in range(steps):
            (weights * slope(rank, step) * size).sum().backward()  # servers divide by size
            optimizer.step()
            optimizer.zero_grad()
            if kill is not None and rank == 0 and step == kill[1]:
                os.kill(kill[0], signal.SIGKILL)
        optimizer.flush()
        hvd.barrier()
        (weights * 0).sum().backward()  # brings everybody's updates back
        optimizer.step()
        optimizer.flush()
        transport = servers_of_job().transport
        hvd.barrier()
        held = audit(lambda _: True) if rank == 0 else {}
        hvd.barrier()
        return {
            "weights": weights.detach().clone(), "audit": held,
            "aggregated": transport.aggregated(), "dropped": transport.dropped(),
        }  # fmt: skip


@pytest.mark.timeout(200)
@pytest.mark.parametrize("lost", [pytest.param(False, marks=pytest.mark.long), True])
def test_what_servers_add_up_for_one_another_counts_once(ranks: RankFactory, lost: bool) -> None:
    workers, steps = 3, 60
    env = {**ENV, "HVD_ORDER_PS_REPLICAS": "1"} if lost else ENV
    with Servers(workers, 3 if lost else 2, env) as servers:
        kill = (servers.pids[0], steps // 2) if lost else None
        results = ranks(workers).run(body_aggregated, servers.env, steps, kill, timeout=150)
        assert sorted(servers.wait()) == ([-signal.SIGKILL, 0, 0] if lost else [0, 0])
    # In the steps that learn the model, servers sum, and the optimizer takes the mean.
    expected = torch.zeros(WIDTH)
    for step in range(steps):
        expected -= LR * sum(slope(rank, step) for rank in range(workers))
    owned = [entry for held in results[0]["audit"].values() for entry in held if entry[3]]
    assert sorted(entry[2] for entry in owned) == list(range(len(owned)))
    assert {entry[4] for entry in owned} == {workers * (steps + 1 - LEARNT)}
    for result in results:
        assert torch.equal(result["weights"], expected)
        assert result["dropped"] == (0, 0)
        slices, size_bytes = result["aggregated"]
        assert slices > 0
        assert size_bytes > 0
