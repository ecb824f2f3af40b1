"""Ranks with different amounts of data: those that have joined take part with zeros."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.flags import await_flag, raise_flag
from helpers.jobs import new_job
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory, RankPool

import hvd_order.torch as hvd
from hvd_order.engine.requests.queues import negotiation

LAST = [(2, 0), (2, 1), (3, 1)]
"""(number of ranks, the one that joins last)"""


def rounds_of(rank: int, last: int, size: int) -> int:
    """How much data a rank has: the last one most, the others each a different amount."""
    return 2 * size + 1 if rank == last else 2 * ((rank - last) % size) - 1


# ---- collectives ----


@pytest.mark.parametrize(("size", "last"), LAST)
@on_ranks()
def test_collectives_go_on_without_those_that_joined(last: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    before = hvd.allreduce_async(torch.full((3,), 1.0), name="before", op=hvd.Sum)
    for turn in range(rounds_of(rank, last, size)):
        here = [r for r in range(size) if turn < rounds_of(r, last, size)]
        x = torch.full((2, 2), float(rank + 1))
        total = float(sum(r + 1 for r in here))
        assert hvd.allreduce(x, op=hvd.Sum).tolist() == [[total] * 2] * 2
        average = hvd.allreduce(x, name="average").flatten().tolist()
        assert average == pytest.approx([total / size] * 4)
        assert hvd.allreduce(torch.tensor(7)).item() == 7 * len(here) // size
        least = 0.0 if len(here) < size else 1.0
        assert hvd.allreduce(torch.tensor(float(rank + 1)), op=hvd.Min).item() == least
        mixed = [torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(1)]
        for got in hvd.grouped_allreduce(mixed, op=hvd.Sum):
            assert got.tolist() == [len(here)] * got.numel()
        rows = hvd.allgather(torch.full((rank + 1, 2), rank))
        assert rows[:, 1].tolist() == [r for r in here for _ in range(r + 1)]
        grouped = hvd.grouped_allgather([torch.tensor([rank]), torch.zeros(0, 3)])
        assert grouped[0].tolist() == here
        part = hvd.reducescatter(torch.ones(size + 1), op=hvd.Sum)
        assert part.tolist() == [float(len(here))] * (2 if rank == 0 else 1)
        hvd.barrier()
        if len(here) < size:
            for refused in (
                lambda: hvd.broadcast(torch.ones(1), last),
                lambda: hvd.alltoall(torch.arange(size)),
                lambda: hvd.broadcast_object(1),
            ):
                with pytest.raises(hvd.HorovodInternalError, match=r"needs every rank, and rank"):
                    refused()
    joined = hvd.join()
    assert hvd.synchronize(before).tolist() == [float(size)] * 3
    assert hvd.allreduce(torch.tensor(1), op=hvd.Sum).item() == size, "and everybody is back"
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))
    assert joined == last


def body_all_at_once() -> list[int]:
    return [hvd.join() for _ in range(3)]


@pytest.mark.parametrize("size", [1, 3])
def test_join_without_anything_else(ranks: RankFactory, size: int) -> None:
    answers = ranks(size).run(body_all_at_once)
    assert answers == [answers[0]] * size
    assert set(answers[0]) <= set(range(size))


# ---- training ----


def model_and_data(rank: int, rounds: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    torch.manual_seed(100 + rank)
    return model, [torch.randn(4, 6) for _ in range(rounds)]


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def train(last: int, more: int) -> list[float]:
    """Uneven data, then ``more`` steps on even data."""
    rank, size = hvd.rank(), hvd.size()
    model, batches = model_and_data(rank, rounds_of(rank, last, size) + more)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8),
        named_parameters=model.named_parameters(),
    )
    for turn, batch in enumerate(batches):
        if turn == len(batches) - more:
            root = hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=root)
            hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return [p.double().sum().item() for p in model.parameters()]


def trained_alone(size: int, last: int, more: int) -> list[float]:
    model, _ = model_and_data(0, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)
    rounds = [rounds_of(rank, last, size) for rank in range(size)]
    data = [model_and_data(rank, rounds[rank] + more)[1] for rank in range(size)]
    uneven = [
        [data[rank][turn] for rank in range(size) if turn < rounds[rank]]
        for turn in range(rounds[last])
    ]
    even = [[data[rank][rounds[rank] + i] for rank in range(size)] for i in range(more)]
    for batches in uneven + even:
        optimizer.zero_grad()
        (sum(loss_of(model, batch) for batch in batches) / size).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [p.double().sum().item() for p in model.parameters()]


def body_train(last: int, more: int, settings: dict[str, str]) -> list[float]:
    with new_job(settings):
        return train(last, more)


@pytest.mark.parametrize(
    ("size", "last", "agreement"),
    [*[(*case, "leader") for case in LAST], (3, 0, "negotiated"), (3, 1, "planned")],
)
def test_uneven_data_trains_as_one_process(
    ranks: RankFactory, size: int, last: int, agreement: str
) -> None:
    settings = {"HVD_ORDER_AGREEMENT": agreement, "HVD_ORDER_SLICE_BYTES": "256"}
    results = ranks(size).run(body_train, last, 3, settings)
    for result in results:
        assert result == pytest.approx(trained_alone(size, last, 3), rel=1e-5, abs=1e-6)
    assert results == [results[0]] * size


def test_a_rank_may_join_while_the_others_tune(two_ranks: RankPool) -> None:
    results = two_ranks.run(body_train, 1, 40, {"HVD_ORDER_TUNE": "1"})
    for result in results:
        assert result == pytest.approx(trained_alone(2, 1, 40), rel=1e-4, abs=1e-5)


# ---- other ways to train ----


def body_sparse_and_accumulated(last: int) -> tuple[list[list[float]], list[list[float]]]:
    """An embedding with sparse gradients, two passes a step, and an optimizer with a closure."""
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    table = torch.nn.Embedding(6, 2, sparse=True)
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([table.weight, weights], lr=0.1), backward_passes_per_step=2
    )
    rates = torch.nn.Parameter(torch.ones(2))
    closing = hvd.DistributedOptimizer(torch.optim.SGD([rates], lr=0.1))
    searched = torch.nn.Parameter(torch.ones(2))  # by an optimizer that uses the loss
    searching = hvd.DistributedOptimizer(torch.optim.LBFGS([searched], lr=0.1, max_iter=1))
    for _ in range(rounds_of(rank, last, size)):
        optimizer.zero_grad()
        for _ in range(2):
            (table(torch.tensor([rank])) * weights).sum().backward()
        optimizer.step()

    def closure() -> torch.Tensor:
        closing.zero_grad()
        loss = (rates * (rank + 1)).sum()
        loss.backward()
        return loss

    hvd.join()
    for _ in range(rounds_of(rank, last, size)):
        closing.step(closure)
    hvd.join()

    def search() -> torch.Tensor:
        searching.zero_grad()
        loss = (searched.square() * (rank + 1)).sum()
        loss.backward()
        return loss

    for turn in range(rounds_of(rank, last, size)):
        here = [r for r in range(size) if turn < rounds_of(r, last, size)]
        value = searched.square().sum().item()  # equal on all ranks
        mean = searching.step(search).item()
        assert mean == pytest.approx(value * sum(r + 1 for r in here) / len(here))
    hvd.join()
    assert table.weight.grad is None or table.weight.grad.is_sparse
    return table.weight.tolist(), [rates.tolist()]


def alone_sparse_and_accumulated(size: int, last: int) -> tuple[list[list[float]], list[float]]:
    torch.manual_seed(0)
    table = torch.nn.Embedding(6, 2)
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([table.weight, weights], lr=0.1)
    rate = 1.0
    for turn in range(rounds_of(last, last, size)):
        here = [r for r in range(size) if turn < rounds_of(r, last, size)]
        optimizer.zero_grad()
        for rank in here:
            (2 * (table(torch.tensor([rank])) * weights).sum() / size).backward()
        optimizer.step()
        rate -= 0.1 * sum(r + 1 for r in here) / size
    return table.weight.tolist(), [rate] * 2


@pytest.mark.parametrize(("size", "last"), [(2, 0), (3, 1)])
def test_sparse_gradients_passes_and_closures(ranks: RankFactory, size: int, last: int) -> None:
    table, rates = ranks(size).run(body_sparse_and_accumulated, last)[last]
    wanted_table, wanted_rates = alone_sparse_and_accumulated(size, last)
    torch.testing.assert_close(torch.tensor(table), torch.tensor(wanted_table))
    assert rates[0] == pytest.approx(wanted_rates)


def body_two_models(last: int) -> list[float]:
    """Two optimizers that take turns, as in a GAN; one rank joins in the middle of a step."""
    rank, size = hvd.rank(), hvd.size()
    a, b = (torch.nn.Parameter(torch.zeros(300)) for _ in range(2))
    first = hvd.DistributedOptimizer(torch.optim.SGD([a], lr=1.0), named_parameters=[("a", a)])
    second = hvd.DistributedOptimizer(torch.optim.SGD([b], lr=1.0), named_parameters=[("b", b)])
    for _ in range(rounds_of(rank, last, size)):
        (a.sum() + b.sum()).backward()
        first.step()
        first.zero_grad()
        second.step()
        second.zero_grad()
    if rank != last:
        a.sum().backward()  # of a step that this rank will not end
    hvd.join()
    with torch.no_grad():
        return [a.mean().item(), b.mean().item()]


@pytest.mark.parametrize(("size", "last"), [(2, 0), (3, 1)])
def test_two_optimizers_and_a_step_that_does_not_end(
    ranks: RankFactory, size: int, last: int
) -> None:
    turns = rounds_of(last, last, size)
    here = [sum(t < rounds_of(r, last, size) for r in range(size)) for t in range(turns)]
    # The gradient of the unended step counts in the next step of the others.
    unended = [
        sum(t == rounds_of(r, last, size) for r in range(size) if r != last) for t in range(turns)
    ]
    a, b = ranks(size).run(body_two_models, last)[last]
    assert b == pytest.approx(-sum(here) / size)
    assert a == pytest.approx(-(sum(here) + sum(unended)) / size)


@pytest.mark.parametrize("last", [0, 1])
@on_ranks(2)
def test_passes_that_are_never_sent(last: int) -> None:
    """Gradients that add up are cleared before any is sent: of no step that others take part in."""
    a = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD([a], lr=1.0), named_parameters=[("a", a)], backward_passes_per_step=2
    )
    for _ in range(3 if hvd.rank() == last else 0):
        for passes in (1, 2):
            optimizer.zero_grad()
            for _ in range(passes):
                a.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    a.sum().backward()
    optimizer.zero_grad()
    a.sum().backward()
    hvd.join()
    assert hvd.rank() != last or a.tolist() == [-2.0, -2.0]


def body_left_behind() -> int:
    """A cycle holds a dropped optimizer until garbage is collected, on each rank at its time."""
    a, b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD([a, b], lr=1.0), named_parameters=[("a", a), ("b", b)]
    )
    a.sum().backward()
    optimizer.itself = optimizer
    gc.disable()
    try:
        del optimizer, a, b
        if hvd.rank() == 1:
            gc.collect()
        return hvd.join()
    finally:
        gc.enable()


def test_an_optimizer_that_was_dropped_in_a_step(two_ranks: RankPool) -> None:
    assert len(set(two_ranks.run(body_left_behind))) == 1


@on_ranks(3)
def test_a_rank_outside_of_a_process_set_may_wait_while_that_trains() -> None:
    ranks = negotiation()
    assert ranks is not None
    two = hvd.add_process_set([0, 1])
    a = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([a], lr=1.0), named_parameters=[("a", a)], process_set=two
    )
    hvd.barrier()
    if hvd.rank() < 2:
        heard = torch.tensor(0)
        while not heard:  # until word of the join has come to both
            heard.fill_(ranks.steps.report is not None)
            hvd.allreduce_(heard, op=hvd.Min, process_set=two)
        for _ in range(3):
            optimizer.zero_grad()
            a.sum().backward()
            optimizer.step()
    hvd.join()
    hvd.remove_process_set(two)
    assert a.tolist() == ([-2.0, -2.0] if hvd.rank() < 2 else [1.0, 1.0])


# ---- mistakes ----


@on_ranks(2)
def test_no_optimizer_can_be_made_while_a_rank_waits() -> None:
    ranks = negotiation()
    assert ranks is not None
    if hvd.rank() == 1:
        while ranks.steps.report is None:  # until word of the join has come
            hvd.allreduce(torch.ones(1))
        with pytest.raises(ValueError, match="while another rank waits in join"):
            hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)], lr=1.0))
    hvd.join()


def body_nobody_else(failed: str) -> str:
    with new_job({"HVD_ORDER_TIMEOUT": "6", "HVD_ORDER_STALL_WARNING": "0.5"}):
        if hvd.rank() == 1:
            await_flag(failed)
            return ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(hvd.HorovodInternalError) as error:
                hvd.join()
        raise_flag(failed)
    return f"{error.type.__name__}: {error.value}; {caught[0].message}"


def test_a_rank_that_never_joins_is_an_error_in_time(two_ranks: RankPool, tmp_path: Path) -> None:
    text = two_ranks.run(body_nobody_else, str(tmp_path / "failed"))[0]
    assert "TransferTimeout: rank 0 waits in join()" in text
    assert "for 0.5 s" in text


@on_ranks(2)
def test_a_rank_that_shuts_down_instead_is_named() -> None:
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"^join\(\): rank 1 has shut down; "):
            hvd.join()
    hvd.shutdown()
    hvd.init()
