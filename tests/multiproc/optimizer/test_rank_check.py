"""Ranks that should be equal and are not: the error says what differs, and on which ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.jobs import new_job, refused
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory
from torch import nn

import hvd_order.torch as hvd
from hvd_order.base.errors import RanksDiffer


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def odd_rank() -> bool:
    return hvd.rank() == hvd.size() - 1


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(3, 4, generator=generator)).square().mean().backward()
        optimizer.step()


# ---- what differs -------------------------------------------------------------------------------


def not_broadcast() -> None:
    model = model_of()
    if odd_rank():
        with torch.no_grad():
            model[2].weight[0, 0] += 1e-6
    train(model, wrap(model, torch.optim.SGD(model.parameters(), lr=0.1)), 1)


def other_class() -> None:
    model = model_of()
    kind = torch.optim.AdamW if odd_rank() else torch.optim.Adam
    wrap(model, kind(model.parameters(), lr=0.1))


def other_rate(as_tensor: bool) -> None:
    model = model_of()
    rate: Any = 0.5 if odd_rank() else 0.25
    groups = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "lr": torch.tensor(rate) if as_tensor else rate},
    ]
    train(model, wrap(model, torch.optim.SGD(groups, lr=0.1)), 1)


def skipped_batch() -> None:
    model = model_of()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for batch in range(12):
        if not (odd_rank() and batch == 2):  # "this batch has no targets"
            train(model, optimizer, 1)
        scheduler.step()


def changed_later() -> None:
    model = model_of()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    train(model, optimizer, 5)
    if odd_rank():
        with torch.no_grad():
            model[0].bias.clamp_(max=0.0)
    train(model, optimizer, 4)  # who has what after step 8 is told in step 9


def other_frozen() -> None:
    model = model_of()
    model[0].requires_grad_(False)
    if odd_rank():
        with torch.no_grad():
            model[0].weight.zero_()
    train(model, wrap(model, torch.optim.SGD(model.parameters(), lr=0.1)), 1)


DIFFERENCES: dict[str, tuple[Callable[[], None], list[str]]] = {
    "not broadcast": (not_broadcast, ["after step 1", "'2.weight'", "broadcast_parameters",
                                      "one value on ranks 0, 1, another on rank 2"]),
    "class": (other_class, ["differ in class", "Adam on ranks 0, 1", "AdamW on rank 2"]),
    "rate": (lambda: other_rate(False),
             ["differ in lr of parameter group 1", "0.25 on ranks 0, 1", "0.5 on rank 2"]),
    "rate in a tensor": (lambda: other_rate(True), ["differ in lr of parameter group 1", "0.25 on",
                                                    "0.5 on rank 2"]),
    "a batch less": (skipped_batch, ["differ in lr of parameter group 0"]),
    "later": (changed_later, ["after step 8", "'0.bias'"]),
    "frozen": (other_frozen, ["'0.weight'"]),
}  # fmt: skip


def body_difference(name: str) -> str:
    return refused(DIFFERENCES[name][0], RanksDiffer)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_named_on_every_rank(ranks: RankFactory, name: str) -> None:
    messages = ranks(3).run(body_difference, name)
    assert len(set(messages)) == 1
    for words in DIFFERENCES[name][1]:
        assert words in messages[0]


# ---- what is right ------------------------------------------------------------------------------


def body_loaded_on_one_rank() -> list[float]:
    """Horovod's own way to go on from a checkpoint: one rank loads, then all are told."""
    model = model_of(hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        optimizer.param_groups[0]["lr"] = 0.01
    optimizer = wrap(model, optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, 9)
    return model[0].weight.flatten().tolist()


def test_a_checkpoint_that_one_rank_loads_and_broadcasts_is_right(ranks: RankFactory) -> None:
    first, second = ranks(2).run(body_loaded_on_one_rank)
    assert first == second


@on_ranks(2)
def test_equal_parameters_may_lie_otherwise_in_memory() -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    if odd_rank():
        model = model.to(memory_format=torch.channels_last)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        model(torch.ones(2, 3, 3, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_a_rank_that_has_joined_is_not_compared() -> None:
    model = model_of()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, 3 + 8 * hvd.rank())  # steps 4 and 8 without rank 0
    last = hvd.join()
    assert last == 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    train(model, optimizer, 6)  # step 16 with it
    optimizer.flush()


def body_process_sets() -> str:
    evens, odds = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])
    for each in (evens, odds):
        hvd.add_process_set(each)
    mine = evens if hvd.rank() % 2 == 0 else odds
    model = model_of(hvd.rank() % 2)  # each set has a model of its own
    rate = 0.1 * (1 + hvd.rank() % 2)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=rate), process_set=mine)
    train(model, optimizer, 4)
    if hvd.rank() == 3:
        with torch.no_grad():
            model[2].bias.zero_()
    if mine is evens:
        train(model, optimizer, 4)
        return ""
    return refused(lambda: train(model, optimizer, 4), RanksDiffer)


def test_ranks_are_compared_within_their_process_set(ranks: RankFactory) -> None:
    try:
        first, second, third, fourth = ranks(4).run(body_process_sets)
    finally:
        ranks(4).close()  # the sets are registered there
    assert first == third == ""
    assert second == fourth
    assert "one value on rank 1, another on rank 3" in second


@on_ranks(2)
def test_the_check_can_be_switched_off() -> None:
    with new_job({"HVD_ORDER_CHECK_RANKS": "0"}):
        model = model_of(hvd.rank())
        kind = torch.optim.AdamW if odd_rank() else torch.optim.Adam
        train(model, wrap(model, kind(model.parameters(), lr=0.1 + hvd.rank())), 4)
