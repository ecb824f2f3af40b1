"""Jobs with more ranks than rank 0 has neighbours: ranks 5 and 6 are below rank 1 in the tree."""

from __future__ import annotations

import re
import signal

from helpers.ranks import run_script, start_script
from helpers.training.scripts import TRAINS_FOR_EVER, trains_a_layer

SIZE = 7

SAME_WEIGHTS = f"""\
{trains_a_layer(size=64, steps=8)}
weights = hvd.allgather(model.weight.detach()[None])
assert all(torch.equal(weights[0], each) for each in weights)
"""


def test_all_ranks_have_the_same_weights() -> None:
    for end in run_script(SIZE, SAME_WEIGHTS, env={"HVD_ORDER_SLICE_BYTES": "1KiB"}):
        assert end.returncode == 0, end.stderr


def test_a_rank_that_dies_is_named_on_all() -> None:
    rank = 6  # at the end of a branch
    with start_script(SIZE, TRAINS_FOR_EVER, env={"HVD_ORDER_TIMEOUT": "20"}) as script:
        for other in range(SIZE):
            script.wait_for_output(other, "reached 5")
        script.kill(rank)
        for other in set(range(SIZE)) - {rank}:
            script.wait_for_output(other, "raised PeerLost")
            assert f"rank {rank} is gone" in script.stdout(other)


def test_a_frozen_rank_is_named_on_all() -> None:
    rank = 6
    with start_script(SIZE, TRAINS_FOR_EVER, env={"HVD_ORDER_TIMEOUT": "8"}) as script:
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
