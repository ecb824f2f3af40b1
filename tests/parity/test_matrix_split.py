"""Programs of test_matrix.py with all-reduces split from the third step on, clipped or not."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.ranks import RankPool
from parity.programs import PROGRAMS
from parity.test_matrix import body_alone, body_compare
from torch import Tensor

import hvd_order.torch as hvd
from hvd_order.engine.engine_host import running_host

OPTIMIZER = "AdamW-foreach"
# Slices of a few elements, which no number of ranks divides evenly.
ENV = {
    "HVD_ORDER_DEBUG": "split",
    "HVD_ORDER_TUNE": "0",
    "HVD_ORDER_SLICE_BYTES": "72",
    "HVD_ORDER_CREDIT_BYTES": "216",
}


def body_split(program: str, alone: dict[str, Tensor]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENV.items():
            patch.setenv(name, value)
        result = body_compare(program, OPTIMIZER, alone, fixed_slices=True)
        host = running_host()
        assert host is not None
        split = host.slice_settings.split
    hvd.shutdown()
    hvd.init()  # without the variables, for the tests that follow in these processes
    return {**result, "split": split}


# With ways of their own to add up, to share or to read gradients; those of random programs with the
# option `split` come on top.
SPLIT_PROGRAMS = ["Accumulating", "Clipped", "Compiled", "Tied", "Transformer", "UnusedOnSomeRanks"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", SPLIT_PROGRAMS)
def test_equals_one_process(three_ranks: RankPool, program: str) -> None:
    alone = three_ranks.run(body_alone, program, OPTIMIZER, timeout=120)[0]
    results = three_ranks.run(body_split, program, alone, timeout=120)
    for rank, result in enumerate(results):
        assert result["errors"] == {}, f"rank {rank} differs from one process"
        assert result["split"]
        assert result["deferred"] == PROGRAMS[program].overlaps
    assert len(set().union(*(result["digests"] for result in results))) == 1
