"""What the other ranks see when one dies, stops or never delivers."""

from __future__ import annotations

import random
import signal

import pytest
from helpers.ranks import run_script, start_script
from helpers.training.scripts import TRAINS_FOR_EVER

TIMEOUT_S = 10


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trials", [3, pytest.param(20, marks=pytest.mark.long)])
def test_the_others_raise_and_exit_when_a_rank_is_killed(trials: int) -> None:
    moments = random.Random(trials)
    for trial in range(trials):
        victim = trial % 3
        with start_script(3, TRAINS_FOR_EVER, env={"HVD_ORDER_TIMEOUT": str(TIMEOUT_S)}) as script:
            # Random in the life of the job: the first steps set up, the later ones overlap.
            script.wait_for_output(victim, f"reached {moments.choice([1, 5])}")
            script.kill(victim)
            ended = script.wait(timeout=TIMEOUT_S)
        for rank, end in enumerate(ended):
            if rank == victim:
                assert end.returncode == -signal.SIGKILL
            else:
                assert end.returncode == 3, f"trial {trial}, rank {rank}: {end.stderr}"
                assert "raised PeerLost" in end.stdout, end.stdout


MISSING = """
import sys
import threading
import torch
import hvd_order.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.ModuleDict({"first": torch.nn.Linear(64, 64), "last": torch.nn.Linear(64, 64)})
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
)
for _ in range(3):  # the first two steps also talk about the model
    model["last"](model["first"](torch.randn(4, 64))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
first = model["first"](torch.randn(4, 64))
if hvd.rank() == 1:
    first = first.detach()  # 'first' gets no gradient here
model["last"](first).sum().backward()
if hvd.rank() == 1:
    print("stuck", flush=True)
    threading.Event().wait()  # and step(), which would say so, is never reached
try:
    optimizer.step()
    optimizer.flush()
except hvd.HorovodInternalError as error:
    print(f"raised {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""


def test_a_gradient_that_never_comes_is_named_with_its_rank() -> None:
    with start_script(
        3, MISSING, env={"HVD_ORDER_TIMEOUT": "10", "HVD_ORDER_SLICE_BYTES": "1KiB"}
    ) as script:
        script.wait_for_output(1, "stuck")
        for rank in (0, 2):
            script.wait_for_output(rank, "raised", 60)
            text = script.stdout(rank)
            assert "'first.weight' has not been produced on rank 1" in text


def test_a_frozen_rank_is_named() -> None:
    with start_script(3, TRAINS_FOR_EVER, env={"HVD_ORDER_TIMEOUT": "8"}) as script:
        script.wait_for_output(1, "reached 5")
        script.kill(1, signal.SIGSTOP)
        for rank in (0, 2):
            script.wait_for_output(rank, "raised", 60)
            assert "no answer from rank 1" in script.stdout(rank)


# A rank stops itself where the ranks talk about something else than gradients.
STOPS = """
import os, signal, sys
import torch
import hvd_order.torch as hvd
from hvd_order.engine import link_probe
from hvd_order.engine.requests import request_runner

def stopping(function):
    def stopped(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGSTOP)
        return function(*args, **kwargs)
    return stopped

where, victim = sys.argv[1:]
if os.environ["RANK"] == victim:
    if where == "measurement":
        link_probe.measure = stopping(link_probe.measure)
    else:
        request_runner.RequestRunner.run = stopping(request_runner.RequestRunner.run)
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
try:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    for _ in range(5):
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
except hvd.HorovodInternalError as error:
    print(f"raised {type(error).__name__}: {error}", flush=True)
    os._exit(3)
"""


@pytest.mark.parametrize(
    ("where", "victim"),
    [
        ("measurement", 0),
        ("broadcast", 1),
        pytest.param("measurement", 1, marks=pytest.mark.long),
        pytest.param("broadcast", 0, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_frozen_outside_of_a_step_is_named(where: str, victim: int) -> None:
    with start_script(3, STOPS, where, str(victim), env={"HVD_ORDER_TIMEOUT": "6"}) as script:
        for rank in {0, 1, 2} - {victim}:
            script.wait_for_output(rank, "raised TransferTimeout", 60)
            words = {
                "measurement": f"no answer from rank {victim}: the process is stopped",
                "broadcast": f"not called on rank {victim}" if victim else "from rank 0",
            }[where]
            assert words in script.stdout(rank)


IDLE = """
import time
import torch
import hvd_order.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
)
for pause in (0, 0, 0, 12):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(pause)  # longer than the timeout: an evaluation, say
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
optimizer.flush()
"""


def test_an_idle_job_outlives_the_timeout() -> None:
    # The control channel once took the group's timeout for its own and ended quiet jobs.
    for end in run_script(2, IDLE, env={"HVD_ORDER_TIMEOUT": "8"}):
        assert end.returncode == 0, end.stderr
