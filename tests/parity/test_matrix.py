"""Training on several ranks ends with the weights of one process on the whole batch.

Every program with two optimizers: float64, 20 steps, 1e-6 relative; bitwise equal between ranks and
between two runs. Updates are deferred where they should be, so the fast path is tested. All other
optimizers: test_separability.py, and random programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.device.device_job import run_on_device
from helpers.jobs import new_job
from helpers.ranks import RankFactory, RankPool
from parity.programs import OPTIMIZERS, PROGRAMS, ROWS, WIDTH, Program
from torch import Tensor

import hvd_order.torch as hvd
from hvd_order.engine.engine_host import engine_host

STEPS = 20
TOLERANCE = 1e-6


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield (
            torch.randn(ROWS, WIDTH, generator=numbers, dtype=torch.float64),
            torch.randn(ROWS, 2, generator=numbers, dtype=torch.float64),
        )


def train(
    program_name: str, optimizer_name: str, distributed: bool, device: str = "cpu"
) -> dict[str, Any]:
    """The weights after 20 steps, and whether updates were ever deferred after step()."""
    torch.manual_seed(1)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(device):
            program: Program = PROGRAMS[program_name]()
        if device != "cpu":  # the initial weights have been drawn when the optimizer is looked at
            torch.accelerator.synchronize()
    finally:
        torch.set_default_dtype(default)
    named = list(program.trainable())
    optimizer = OPTIMIZERS[optimizer_name]([p for _, p in named])
    if distributed:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, backward_passes_per_step=program.passes
        )
    program.start(optimizer)
    ranks = hvd.size()
    deferred = False
    for step, (x, y) in enumerate(batches(seed=3)):
        x, y = x.to(device), y.to(device)
        rows = torch.arange(ROWS)
        of_first = rows % ranks == 0
        mine = rows % ranks == hvd.rank() if distributed else rows >= 0

        def backward(
            x: Tensor = x, y: Tensor = y, mine: Tensor = mine, of_first: Tensor = of_first
        ) -> Tensor:
            program.zero(optimizer)
            for part in range(program.passes):
                take = mine & (torch.arange(ROWS) * program.passes // ROWS == part)
                loss = program.loss(x[take], y[take], of_first[take].to(device))
                loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(backward)
        else:
            backward()
            program.update(optimizer)
        if step >= 2:  # before, parameters are only watched
            report = getattr(optimizer, "overlap_report", lambda: None)()
            deferred |= report is not None and report.deferred_parameters > 0
        program.end_of_step()
    return {
        "deferred": deferred,
        "weights": {name: p.detach().clone().cpu() for name, p in named},
        "untouched": [name for name, p in named if p.grad is None],
    }


def digest(weights: dict[str, Tensor]) -> str:
    whole = hashlib.sha256()
    for name, tensor in weights.items():
        whole.update(name.encode() + tensor.numpy().tobytes())
    return whole.hexdigest()


def body_alone(program: str, optimizer: str) -> dict[str, Tensor]:
    """One process's weights; the other ranks have better things to do."""
    if hvd.rank() != 0:
        return {}
    weights: dict[str, Tensor] = train(program, optimizer, distributed=False)["weights"]
    return weights


def body_compare(
    program: str, optimizer: str, alone: dict[str, Tensor], fixed_slices: bool = False
) -> dict[str, Any]:
    hvd.shutdown()  # slice settings are tried out once in a job, and the outcome is anything:
    hvd.init()  # this case has trials of its own, which begin with deferred updates
    first = train(program, optimizer, distributed=True)
    again = first
    # The last bits of norms depend on the slices that trials choose, unless they are fixed.
    if fixed_slices or program != "Clipped":
        again = train(program, optimizer, distributed=True)
    errors = {
        name: float((first["weights"][name] - wanted).abs().max() / wanted.abs().max())
        for name, wanted in alone.items()
    }
    return {
        "errors": {name: error for name, error in errors.items() if not error <= TOLERANCE},
        "digests": {digest(first["weights"]), digest(again["weights"])},
        "deferred": first["deferred"],
    }


CASES = [
    *((program, "AdamW-foreach") for program in PROGRAMS),
    *((program, "SGD") for program in PROGRAMS if not program.startswith("Compiled")),
    # Its closure takes the place of the loop's own backward, so what is around update() goes.
    *((program, "LBFGS") for program in ("Plain", "Accumulating", "UnusedOnSomeRanks")),
]
ON_RANKS = [
    pytest.param(
        program, optimizer, size,
        # With three ranks sums are rounded otherwise; which optimizer uses them matters less.
        marks=[pytest.mark.long] if (optimizer, size) == ("SGD", 3) else [],
    )
    for program, optimizer in CASES
    for size in (2, 3)
]  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("program", "optimizer", "size"), ON_RANKS)
def test_equals_one_process(ranks: RankFactory, program: str, optimizer: str, size: int) -> None:
    # Two calls, so that ranks meet in between: rank 0 alone trains in the first.
    alone = ranks(size).run(body_alone, program, optimizer, timeout=120)[0]
    results = ranks(size).run(body_compare, program, optimizer, alone, timeout=120)
    for rank, result in enumerate(results):
        assert result["errors"] == {}, f"rank {rank} differs from one process"
    assert len(set().union(*(result["digests"] for result in results))) == 1
    overlaps = PROGRAMS[program].overlaps and optimizer != "LBFGS"
    assert all(result["deferred"] == overlaps for result in results)


# ---- all-reduces split from the third step on, clipped or not -----------------------------------

# Slices of a few elements, which no number of ranks divides evenly.
SPLIT = {
    "HVD_ORDER_DEBUG": "split",
    "HVD_ORDER_TUNE": "0",
    "HVD_ORDER_SLICE_BYTES": "72",
    "HVD_ORDER_CREDIT_BYTES": "216",
}


def body_split(program: str, alone: dict[str, Tensor]) -> dict[str, Any]:
    with new_job(SPLIT):
        result = body_compare(program, "AdamW-foreach", alone, fixed_slices=True)
        return {**result, "split": engine_host().slice_settings.split}


# With ways of their own to add up, to share or to read gradients; those of random programs with the
# option `split` come on top.
SPLIT_PROGRAMS = ["Accumulating", "Clipped", "Compiled", "Tied", "Transformer", "UnusedOnSomeRanks"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", SPLIT_PROGRAMS)
def test_split_all_reduces_equal_one_process(three_ranks: RankPool, program: str) -> None:
    alone = three_ranks.run(body_alone, program, "AdamW-foreach", timeout=120)[0]
    results = three_ranks.run(body_split, program, alone, timeout=120)
    for rank, result in enumerate(results):
        assert result["errors"] == {}, f"rank {rank} differs from one process"
        assert result["split"]
        assert result["deferred"] == PROGRAMS[program].overlaps
    assert len(set().union(*(result["digests"] for result in results))) == 1


# ---- on a device that runs behind the host (tests/device) ----------------------------------------

# torch.compile knows no back end for the test device, which has no operator for an LSTM.
NOT_HERE = ("Compiled", "Recurrent")


@pytest.mark.timeout(400)  # the first one builds the device
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=[] if name == "AdamW-foreach" else [pytest.mark.long])
        for name in OPTIMIZERS
    ],
)
def test_a_device_equals_one_process(optimizer: str) -> None:
    programs = [
        program for program, used in CASES if used == optimizer and not program.startswith(NOT_HERE)
    ]
    run_on_device(
        f"""
        from parity.programs import PROGRAMS
        from parity.test_matrix import TOLERANCE, train

        device.set_delays(-1, random_us=50)
        wrong = []
        for program in {programs}:
            try:
                result = train(program, {optimizer!r}, True, NAME)
            except Exception as error:
                raise AssertionError(program) from error
            alone = train(program, {optimizer!r}, False)["weights"]
            for name, wanted in alone.items():
                error = (result["weights"][name] - wanted).abs().max() / wanted.abs().max()
                if not error <= TOLERANCE:
                    wrong.append((program, name, float(error)))
            overlaps = PROGRAMS[program].overlaps and {optimizer!r} != "LBFGS"
            if result["deferred"] != overlaps:
                wrong.append((program, "deferred", result["deferred"]))
        assert not wrong, wrong
        """,
        timeout=240,
    )
