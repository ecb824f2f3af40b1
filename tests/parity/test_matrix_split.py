"""The programs of test_matrix.py with all-reduces split from the third step on, clipped or not."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.ranks import RankFactory
from parity.programs import PROGRAMS
from parity.test_matrix import CASES, WITH_EVERY_PROGRAM, body_alone, body_compare
from torch import Tensor

import hvd_order.torch as hvd
from hvd_order.engine.engine_host import running_host

# Slices of a few elements, which no number of ranks divides evenly.
ENV = {
    "HVD_ORDER_DEBUG": "split",
    "HVD_ORDER_TUNE": "0",
    "HVD_ORDER_SLICE_BYTES": "72",
    "HVD_ORDER_CREDIT_BYTES": "216",
}


def body_split(program: str, optimizer: str, alone: dict[str, Tensor]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENV.items():
            patch.setenv(name, value)
        result = body_compare(program, optimizer, alone, fixed_slices=True)
        host = running_host()
        assert host is not None
        split = host.slice_settings.split
    hvd.shutdown()
    hvd.init()  # without the variables, for the tests that follow in these processes
    return {**result, "split": split}


def is_long(program: str, optimizer: str, size: int) -> bool:
    return program.startswith("Compiled") or optimizer != "AdamW-foreach" or size == 3


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "optimizer", "size"),
    [
        pytest.param(*case, size, marks=[pytest.mark.long] if is_long(*case, size) else [])
        for case in CASES
        if case[1] in WITH_EVERY_PROGRAM
        for size in (2, 3)
    ],
)
def test_equals_one_process(ranks: RankFactory, program: str, optimizer: str, size: int) -> None:
    alone = ranks(size).run(body_alone, program, optimizer, timeout=120)[0]
    results = ranks(size).run(body_split, program, optimizer, alone, timeout=120)
    for rank, result in enumerate(results):
        assert result["errors"] == {}, f"rank {rank} differs from one process"
        assert result["split"]
        assert result["deferred"] == PROGRAMS[program].overlaps
    assert len(set().union(*(result["digests"] for result in results))) == 1
