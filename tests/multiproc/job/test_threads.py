"""The threads of a training process: few, and no more with more ranks than is documented."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from helpers.ranks import run_script

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="counts threads in /proc"
)

# The numbers of docs/architecture.md, "Threads and locks".
_OF_A_RANK = 16
_MORE_ON_AN_INNER_RANK = 2  # rank 1 of seven has two children
_MORE_ON_RANK_0 = 2  # name order, and the store of the job
_MORE_ON_RANK_0_FOR_EACH_FURTHER_CHILD = 2
_MORE_ON_RANK_0_WITH_FAR_PEERS = 4
_OF_A_DEFAULT_GROUP = 3

# Trains, and prints the names of its threads. The gradients are large enough for the copier.
TRAINS = """
import gc, os, sys
gc.disable()  # shutdown() leaves nothing for later
import torch
import torch.distributed as dist
import hvd_order.torch as hvd

if sys.argv[1] == "joins":
    dist.init_process_group("gloo")

def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 8))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(10):
        optimizer.zero_grad()
        model(torch.full((2, 512), 0.1 * (hvd.rank() + step))).square().mean().backward()
        optimizer.step()
    return optimizer

hvd.init()
for _ in range(3 if sys.argv[1] == "again" else 0):
    train()
    hvd.shutdown()
    hvd.init()
optimizer = train()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
for task in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{task}/comm") as comm:
        print(comm.read().strip())
hvd.allreduce(torch.ones(1))  # nobody leaves before all have counted
"""


def _threads(size: int, how: str = "alone", **env: str) -> list[Counter[str]]:
    """Trains on `size` ranks and returns the threads of each rank, by name."""
    ends = run_script(size, TRAINS, how, env=env)
    for end in ends:
        assert end.returncode == 0, end.stderr
    return [Counter(end.stdout.split("\n")[:-1]) for end in ends]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long), 7])
def test_a_training_process_has_few_threads_whatever_the_number_of_ranks(size: int) -> None:
    first, *others = _threads(size)
    for threads in (first, *others):
        assert threads["hvdo engine"] == 1, threads
        assert threads["hvdo copier"] == 1, threads
    for threads in others:
        inner = _MORE_ON_AN_INNER_RANK if size > 5 else 0
        assert threads.total() <= _OF_A_RANK + inner, threads
    further = min(size - 2, 3) * _MORE_ON_RANK_0_FOR_EACH_FURTHER_CHILD
    further += _MORE_ON_RANK_0_WITH_FAR_PEERS if size > 5 else 0
    assert first.total() <= _OF_A_RANK + _MORE_ON_RANK_0 + further, first


def test_a_program_with_a_default_group_has_only_the_threads_of_that_group_more() -> None:
    for threads in _threads(2, "joins"):
        assert threads.total() <= _OF_A_RANK + _MORE_ON_RANK_0 + _OF_A_DEFAULT_GROUP, threads


def test_threads_of_jobs_that_have_ended_do_not_pile_up() -> None:
    for threads in _threads(2, "again"):  # four jobs, of which the last but one may be in memory
        assert threads["gloo_tcp_loop"] <= 2 * 2, threads


def test_gloo_uses_every_interface_that_the_user_names() -> None:
    for threads in _threads(2, GLOO_SOCKET_IFNAME="lo,lo"):
        assert threads["gloo_tcp_loop"] == 2 * 2, threads


def test_an_interface_that_does_not_exist_is_an_error() -> None:
    for end in run_script(2, TRAINS, "alone", env={"GLOO_SOCKET_IFNAME": "nosuch0"}):
        assert end.returncode == 1
        assert "nosuch0" in end.stderr, end.stderr
