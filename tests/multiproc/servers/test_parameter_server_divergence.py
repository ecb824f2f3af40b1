"""How far a copy may lag behind what workers have been told: as far as the bound, no further.

Every update moves the parameters by the same, known distance, in numbers that floats hold exactly.
The copy's server is stopped, so that it takes in nothing, until the workers get no more answers;
then the owner is killed and the copy takes over.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import RankPool
from helpers.servers import Servers, audit, job, servers_of_job
from torch import Tensor

import hvd_order.torch as hvd
from hvd_order.engine.engine_host import engine_host

WIDTH = 32
RATE = 0.125
DISTANCE = RATE  # of an update: the gradient has the norm 1
BEFORE, AFTER = 10, 5  # steps before the copy stops and after it takes over
PATIENCE_S = 60
TOO_FAR_S = 1.0  # time to run too far ahead
OWNER, REPLICA = 0, 1


def body_copy_stops(
    env: Mapping[str, str], pids: Sequence[int], path: str, expected: int
) -> dict[str, Any]:
    """Trains; the copy's server stops, later the owner is killed and the copy takes over.

    Args:
        pids: of the owner and of the copy's server.
        path: file for the number of steps that each rank has finished.
        expected: steps that the workers are to finish while the copy stands still.

    Returns:
        Steps that each rank had finished when no more came, how far the workers' last weights were
        then from those that the copy had, and from those that it went on with; how far the end is
        from that many updates.
    """
    with job(env):
        done = np.memmap(path, dtype=np.int64, mode="r+", shape=(hvd.size(),))
        model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=RATE), named_parameters=model.named_parameters()
        )
        seen: list[Tensor] = []  # weights that the servers have told of, by step

        def step() -> None:
            model(torch.full((1, WIDTH), 1 / WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.flush()
            seen.append(model.weight.detach().clone())
            done[hvd.rank()] += 1

        for _ in range(BEFORE):
            step()
        hvd.barrier()
        stalled: list[int] = []
        takeover = threading.Thread(
            target=_take_over, args=(pids, done, BEFORE + expected, stalled), daemon=True
        )
        if hvd.rank() == 0:
            held = audit(_copied)
            assert _copied(held), held
            places = servers_of_job().transport.places(max(engine_host().models))
            assert places == [(OWNER, REPLICA)]
            os.kill(pids[REPLICA], signal.SIGSTOP)
            takeover.start()
        hvd.barrier()
        for _ in range(expected + 1 + AFTER):
            step()
        hvd.barrier()
        if hvd.rank() == 0:
            takeover.join(PATIENCE_S)
            assert not takeover.is_alive()
        update = seen[1] - seen[0]
        told = BEFORE + expected - 1
        return {
            "stalled": [int(each) - BEFORE for each in stalled],
            "from_stopped": _distance(seen[told], seen[BEFORE - 1]),
            "from_takeover": _distance(seen[told], seen[told + 1] - update),
            "from_all": _distance(seen[-1], len(seen) * update),
        }


def _copied(held: Mapping[int, Sequence[Sequence[int]]]) -> bool:
    """Each server has the one slice, in the same version."""
    entries = [entry for entries in held.values() for entry in entries]
    return len(entries) == 2 and len({tuple(entry[4:]) for entry in entries}) == 1


def _take_over(
    pids: Sequence[int],
    done: np.ndarray[Any, np.dtype[np.int64]],
    expected: int,
    stalled: list[int],
) -> None:
    """Waits for as many steps as there are to be, and for more; then the copy takes over."""
    deadline = time.monotonic() + PATIENCE_S
    while done.min() < expected and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(TOO_FAR_S)
    stalled += done.tolist()
    os.kill(pids[OWNER], signal.SIGKILL)
    os.kill(pids[REPLICA], signal.SIGCONT)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())


def start(bound: float) -> Servers:
    """Two servers, the first one with number 0."""
    env = {
        "HVD_ORDER_PS_UPDATE": "server",
        "HVD_ORDER_PS_REPLICAS": "1",
        "HVD_ORDER_PS_DIVERGENCE": str(bound),
        "HVD_ORDER_PS_BALANCE": "0",
        "HVD_ORDER_SLICE_BYTES": "64KiB",
    }
    return Servers(2, 2, env, in_order=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("bound", "steps"),
    [
        pytest.param(0.0, 0, marks=pytest.mark.long),
        (3.5 * DISTANCE, 3),
        # Exactly as far as allowed.
        pytest.param(DISTANCE, 1, marks=pytest.mark.long),
        pytest.param(10 * DISTANCE, 10, marks=pytest.mark.long),
    ],
)
def test_workers_are_told_no_more_than_the_bound_allows(
    two_ranks: RankPool, tmp_path: Path, bound: float, steps: int
) -> None:
    table = tmp_path / "done"
    np.zeros(2, dtype=np.int64).tofile(table)
    with start(bound) as servers:
        results = two_ranks.run(
            body_copy_stops, servers.env, servers.pids, str(table), steps, timeout=200
        )
        assert servers.wait(PATIENCE_S) == [-signal.SIGKILL, 0]
    assert results[0]["stalled"] == [steps, steps], "answers came, or not, against the bound"
    for result in results:
        assert result["from_stopped"] == steps * DISTANCE <= bound
        # What the copy goes on with is at most as far away: some may still have reached it.
        assert result["from_takeover"] <= bound
        if bound == 0:
            assert result["from_all"] == 0, "an update is lost or applied twice"
        else:
            assert result["from_all"] <= bound
