"""What the other ranks see when one dies, stops or never delivers."""

from __future__ import annotations

import signal

import pytest
from helpers.ranks import run_script, start_script
from helpers.training.scripts import TRAINS_FOR_EVER, trains_a_layer

TIMEOUT_S = 10


@pytest.mark.parametrize(("victim", "step"), [(0, 5), (1, 1), (2, 5)])
def test_the_others_raise_and_exit_when_a_rank_is_killed(victim: int, step: int) -> None:
    """The first step sets up, later ones overlap; random moments are in tests/chaos."""
    with start_script(3, TRAINS_FOR_EVER, env={"HVD_ORDER_TIMEOUT": str(TIMEOUT_S)}) as script:
        script.wait_for_output(victim, f"reached {step}")
        script.kill(victim)
        ended = script.wait(timeout=TIMEOUT_S)
    for rank, end in enumerate(ended):
        if rank == victim:
            assert end.returncode == -signal.SIGKILL
        else:
            assert end.returncode == 3, f"rank {rank}: {end.stderr}"
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
    ("where", "victim", "words"),
    [
        ("measurement", 0, "no answer from rank 0: the process is stopped"),
        ("broadcast", 1, "not called on rank 1"),
    ],
)
def test_a_rank_that_is_frozen_outside_of_a_step_is_named(
    where: str, victim: int, words: str
) -> None:
    with start_script(3, STOPS, where, str(victim), env={"HVD_ORDER_TIMEOUT": "6"}) as script:
        for rank in {0, 1, 2} - {victim}:
            script.wait_for_output(rank, "raised TransferTimeout", 60)
            assert words in script.stdout(rank)


IDLE = f"""\
import time
{trains_a_layer()}
time.sleep(12)  # longer than the timeout: an evaluation, say
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
optimizer.flush()
"""


def test_an_idle_job_outlives_the_timeout() -> None:
    # The control channel once took the group's timeout for its own and ended quiet jobs.
    for end in run_script(2, IDLE, env={"HVD_ORDER_TIMEOUT": "8"}):
        assert end.returncode == 0, end.stderr
