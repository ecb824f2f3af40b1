"""Ranks that should be equal and are not: the error says what differs, and on which ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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


def text_of_error(work: Callable[[], object]) -> str:
    with pytest.raises(RanksDiffer) as caught:
        work()
    return str(caught.value)


# ---- what differs -------------------------------------------------------------------------------


def body_no_broadcast() -> str:
    model = model_of()
    if odd_rank():
        with torch.no_grad():
            model[2].weight[0, 0] += 1e-6
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return text_of_error(lambda: train(model, optimizer, 1))


def test_parameters_that_nobody_broadcast_are_named_after_the_first_step(
    ranks: RankFactory,
) -> None:
    messages = ranks(3).run(body_no_broadcast)
    assert len(set(messages)) == 1
    assert "after step 1" in messages[0]
    assert "'2.weight'" in messages[0]
    assert "one value on ranks 0, 1, another on rank 2" in messages[0]
    assert "broadcast_parameters" in messages[0]


def body_other_class() -> str:
    model = model_of()
    kind = torch.optim.AdamW if odd_rank() else torch.optim.Adam
    return text_of_error(lambda: wrap(model, kind(model.parameters(), lr=0.1)))


def test_other_classes_of_optimizers_are_named(ranks: RankFactory) -> None:
    messages = ranks(3).run(body_other_class)
    assert len(set(messages)) == 1
    assert "differ in class" in messages[0]
    assert "Adam on ranks 0, 1" in messages[0]
    assert "AdamW on rank 2" in messages[0]


def learning_rate(kind: str) -> Any:
    value = 0.5 if odd_rank() else 0.25
    return torch.tensor(value) if kind == "tensor" else value


def body_other_learning_rate(kind: str) -> str:
    model = model_of()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()},
         {"params": model[2].parameters(), "lr": learning_rate(kind)}], lr=0.1,
    )  # fmt: skip
    optimizer = wrap(model, optimizer)
    return text_of_error(lambda: train(model, optimizer, 1))


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_other_hyper_parameters_are_named(ranks: RankFactory, kind: str) -> None:
    messages = ranks(2).run(body_other_learning_rate, kind)
    assert len(set(messages)) == 1
    assert "differ in lr of parameter group 1" in messages[0]
    assert "0.25 on rank 0" in messages[0]
    assert "0.5 on rank 1" in messages[0]


def body_skipped_batch() -> str:
    model = model_of()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def epoch() -> None:
        for batch in range(12):
            if not (odd_rank() and batch == 2):  # "this batch has no targets"
                train(model, optimizer, 1)
            scheduler.step()

    return text_of_error(epoch)


def test_a_rank_that_skips_a_batch_is_found_by_its_schedule(ranks: RankFactory) -> None:
    messages = ranks(2).run(body_skipped_batch)
    assert len(set(messages)) == 1
    assert "differ in lr of parameter group 0" in messages[0]


def body_changed_later() -> str:
    model = model_of()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    train(model, optimizer, 5)
    if odd_rank():
        with torch.no_grad():
            model[0].bias.clamp_(max=0.0)
    train(model, optimizer, 3)  # to step 8; who has what then is told in step 9
    return text_of_error(lambda: train(model, optimizer, 1))


def test_a_change_on_one_rank_is_found_at_the_next_look(ranks: RankFactory) -> None:
    for message in ranks(2).run(body_changed_later):
        assert "after step 8" in message
        assert "'0.bias'" in message


def body_frozen() -> str:
    model = model_of()
    model[0].requires_grad_(False)
    if odd_rank():
        with torch.no_grad():
            model[0].weight.zero_()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return text_of_error(lambda: train(model, optimizer, 1))


def test_frozen_parameters_are_compared_as_well(ranks: RankFactory) -> None:
    for message in ranks(2).run(body_frozen):
        assert "'0.weight'" in message


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


def body_memory_format() -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    if odd_rank():
        model = model.to(memory_format=torch.channels_last)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        model(torch.ones(2, 3, 3, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_equal_parameters_may_lie_otherwise_in_memory(ranks: RankFactory) -> None:
    ranks(2).run(body_memory_format)


def body_join() -> None:
    model = model_of()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, 3 + 8 * hvd.rank())  # steps 4 and 8 without rank 0
    last = hvd.join()
    assert last == 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    train(model, optimizer, 6)  # step 16 with it
    optimizer.flush()


def test_a_rank_that_has_joined_is_not_compared(ranks: RankFactory) -> None:
    ranks(2).run(body_join)


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
    return text_of_error(lambda: train(model, optimizer, 4))


def test_ranks_are_compared_within_their_process_set(ranks: RankFactory) -> None:
    try:
        first, second, third, fourth = ranks(4).run(body_process_sets)
    finally:
        ranks(4).close()  # the sets are registered there
    assert first == third == ""
    assert second == fourth
    assert "one value on rank 1, another on rank 3" in second


def body_switched_off() -> None:
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_ORDER_CHECK_RANKS", "0")
        hvd.init()
        model = model_of(hvd.rank())
        kind = torch.optim.AdamW if odd_rank() else torch.optim.Adam
        optimizer = wrap(model, kind(model.parameters(), lr=0.1 + hvd.rank()))
        train(model, optimizer, 4)
        hvd.shutdown()


def test_the_check_can_be_switched_off(ranks: RankFactory) -> None:
    ranks(2).run(body_switched_off)
