"""Training on several ranks equals training in one process, bit for bit the same on every rank."""

from __future__ import annotations

import pytest
from bodies.parity_scenarios import OPTIMIZERS, SCENARIOS, body
from helpers.ranks import RankFactory

TOLERANCE = 1e-6  # relative to the largest weight of a parameter, float64

CASES = [
    (scenario, optimizer)
    for scenario, how in SCENARIOS.items()
    for optimizer in OPTIMIZERS
    if optimizer not in how.without
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("scenario", "optimizer"), CASES)
def test_equals_one_process(ranks: RankFactory, scenario: str, optimizer: str, size: int) -> None:
    # Compiling is slow; one optimizer shows that a second run gives the same.
    runs = 1 if SCENARIOS[scenario].compile and optimizer != "SGD" else 2
    outcomes = ranks(size).run(body, scenario, optimizer, runs)
    error = outcomes[0].error
    assert error is not None
    assert error <= TOLERANCE, f"'{outcomes[0].where}' differs by {error}"
    digests = {digest for outcome in outcomes for digest in outcome.digests}
    assert len(digests) == 1, "weights differ between ranks or runs"
    if optimizer != "LBFGS":  # its steps are complete when they return
        assert not any(outcome.not_deferred for outcome in outcomes), outcomes[0].not_deferred


def test_equals_one_process_with_inductor(ranks: RankFactory) -> None:
    outcomes = ranks(2).run(body, "compiled_model", "AdamW-fused", 1, "inductor", timeout=200.0)
    assert outcomes[0].error is not None
    assert outcomes[0].error <= TOLERANCE
    assert outcomes[0].digests == outcomes[1].digests
