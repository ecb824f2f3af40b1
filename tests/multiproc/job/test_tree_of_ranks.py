"""Jobs with more ranks than rank 0 has neighbours: ranks 5 and 6 are below rank 1 in the tree."""

from __future__ import annotations

import re
import signal

from helpers.ranks import run_script, start_script

SIZE = 7

# Trains for so many steps, or for ever; prints sums of its weights.
TRAIN = """
import sys
import torch
import hvd_order.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-2), named_parameters=model.named_parameters()
)
torch.manual_seed(hvd.rank())
steps = int(sys.argv[1])
step = 0
try:
    while step != steps:
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 5:
            print("reached 5", flush=True)
    optimizer.flush()
    print("weights", [p.double().sum().item() for p in model.parameters()])
except hvd.HorovodInternalError as error:
    print(f"raised {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""


def line(output: str, start: str) -> str:
    return next(text for text in output.splitlines() if text.startswith(start))


def test_all_ranks_have_the_same_weights() -> None:
    ends = run_script(SIZE, TRAIN, "8", env={"HVD_ORDER_SLICE_BYTES": "8KiB"})
    assert all(end.returncode == 0 for end in ends), ends
    assert len({line(end.stdout, "weights") for end in ends}) == 1


def test_a_rank_that_dies_is_named_on_all() -> None:
    rank = 6  # at the end of a branch
    with start_script(SIZE, TRAIN, "-1", env={"HVD_ORDER_TIMEOUT": "20"}) as script:
        for other in range(SIZE):
            script.wait_for_output(other, "reached 5")
        script.kill(rank)
        for other in set(range(SIZE)) - {rank}:
            script.wait_for_output(other, "raised PeerLost")
            assert f"rank {rank} is gone" in script.stdout(other)


def test_a_frozen_rank_is_named_on_all() -> None:
    rank = 6
    with start_script(SIZE, TRAIN, "-1", env={"HVD_ORDER_TIMEOUT": "8"}) as script:
        for other in range(SIZE):
            script.wait_for_output(other, "reached 5")
        script.kill(rank, signal.SIGSTOP)
        for other in set(range(SIZE)) - {rank}:
            script.wait_for_output(other, "raised")
            assert f"no answer from rank {rank}" in script.stdout(other)


COLLECTIVES = """
import sys
import torch
import hvd_order.torch as hvd

hvd.init()
count = 0
try:
    while True:
        hvd.allreduce(torch.ones(3), name=f"sum {count}")
        count += 1
        if count == 5:
            print("reached 5", flush=True)
except hvd.HorovodInternalError as error:
    print(f"raised {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""


def test_a_rank_that_dies_between_collectives_ends_them_on_all() -> None:
    rank = 1  # within a branch
    with start_script(SIZE, COLLECTIVES, env={"HVD_ORDER_TIMEOUT": "20"}) as script:
        for other in range(SIZE):
            script.wait_for_output(other, "reached 5")
        script.kill(rank)
        for other in set(range(SIZE)) - {rank}:
            script.wait_for_output(other, "raised PeerLost")
        assert re.search(rf"ranks? .*\b{rank}\b.* (died or left|is gone)", script.stdout(0))
