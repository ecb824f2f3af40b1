"""Collectives among some of the ranks, while others do something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage, ModelMismatch


def body_two_halves() -> list[Any]:
    """Ranks 0 and 2 sum, rank 1 (and 3) do another number of other things."""
    rank = hvd.rank()
    even = hvd.add_process_set([2, 0])
    odd = hvd.add_process_set(hvd.ProcessSet([1]))
    assert (even.process_set_id, odd.process_set_id) == (1, 2)
    assert even.ranks == [0, 2]
    mine = even if rank % 2 == 0 else odd
    assert mine.included()
    assert mine.size() == len(mine.ranks)
    assert mine.rank() == mine.ranks.index(rank)
    results: list[Any] = []
    for _ in range(3 if rank % 2 == 0 else 1):
        results = [
            hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=mine).item(),
            hvd.allreduce(torch.tensor(float(rank)), process_set=mine).item(),
            hvd.allgather(torch.full((rank + 1,), rank), process_set=mine).tolist(),
            hvd.broadcast(torch.tensor(rank), mine.ranks[-1], process_set=mine).item(),
            hvd.alltoall(torch.arange(len(mine.ranks)), process_set=mine).tolist(),
            hvd.reducescatter(torch.ones(len(mine.ranks)), op=hvd.Sum, process_set=mine).tolist(),
            hvd.grouped_allreduce([torch.tensor(rank)], op=hvd.Max, process_set=mine)[0].item(),
            hvd.broadcast_object({"rank": rank}, mine.ranks[0], process_set=mine),
            hvd.allgather_object(rank, process_set=mine),
        ]
    hvd.barrier(process_set=mine)
    assert hvd.allreduce(torch.tensor(1), op=hvd.Sum).item() == hvd.size(), "all ranks still work"
    other = odd if rank % 2 == 0 else even
    with pytest.raises(InvalidUsage, match=f"rank {rank} does not belong to"):
        hvd.allreduce(torch.tensor(1), process_set=other)
    with pytest.raises(ValueError, match="not part of provided"):
        other.rank()
    assert hvd.remove_process_set(even)
    assert not hvd.remove_process_set(even)
    assert even.process_set_id is None
    assert even.size() is None
    again = hvd.add_process_set([0, 2])
    assert again.process_set_id == 3
    hvd.remove_process_set(odd)
    hvd.remove_process_set(again)
    assert not hvd.remove_process_set(hvd.global_process_set)
    return results


def test_each_set_goes_its_own_way(ranks: RankFactory) -> None:
    first, second, third = ranks(3).run(body_two_halves)
    gathered = [0, 2, 2, 2]
    assert first == [2, 1.0, gathered, 2, [0, 0], [2.0], 2, {"rank": 0}, [0, 2]]
    assert third == [2, 1.0, gathered, 2, [1, 1], [2.0], 2, {"rank": 0}, [0, 2]]
    assert second == [1, 1.0, [1, 1], 1, [0], [1.0], 1, {"rank": 1}, [1]]


def body_optimizers() -> list[list[float]]:
    """Two sets of two ranks, which share rank 1, each with an optimizer; rank 0 is in one."""
    rank = hvd.rank()
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])]
    weights = [torch.nn.Parameter(torch.zeros(400)) for _ in sets]
    tables = [torch.nn.Embedding(3, 2, sparse=True) for _ in sets]
    for table in tables:
        torch.nn.init.zeros_(table.weight)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD([w, table.weight], lr=1.0), process_set=one, op=op)
        for w, table, one, op in zip(weights, tables, sets, (hvd.Average, hvd.Sum), strict=True)
    ]
    for step in range(8):
        for w, table, optimizer in zip(weights, tables, optimizers, strict=True):
            optimizer.zero_grad()
            (w.sum() * (rank + 1) + table(torch.tensor([rank])).sum() * step).backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        assert all(torch.equal(w, w[0].expand_as(w)) for w in weights)
        results = [[w[0].item(), *table.weight[:, 0].tolist()]
                   for w, table in zip(weights, tables, strict=True)]  # fmt: skip
    del optimizers, optimizer
    for one in sets:
        hvd.remove_process_set(one)
    return results


def test_an_optimizer_exchanges_within_its_set(ranks: RankFactory) -> None:
    first, second, third = ranks(3).run(body_optimizers)
    # 8 steps with gradients 1, 2 and 3; rows get 0 + 1 + ... + 7 = 28.
    average = [-8 * 1.5, -14.0, -14.0, 0.0]
    total = [-8 * 5.0, 0.0, -28.0, -28.0]
    assert first == [average, [-8.0, -28.0, 0.0, 0.0]], "outside of the second set: its own"
    assert second == [average, total]
    assert third == [[-24.0, 0.0, 0.0, -28.0], total]


def body_wrong_models() -> str:
    pair = hvd.add_process_set([1, 2])
    text = ""
    parameter = torch.nn.Parameter(torch.zeros(hvd.rank()))
    if hvd.rank() in pair.ranks:
        with pytest.raises(ModelMismatch) as caught:
            hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), process_set=pair)
        text = str(caught.value)
    hvd.remove_process_set(pair)
    with pytest.raises(InvalidUsage, match="not registered"):
        hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), process_set=pair)
    return text


def test_a_model_that_differs_in_the_set_is_named(ranks: RankFactory) -> None:
    _, second, third = ranks(3).run(body_wrong_models)
    assert second == third
    assert "shape [1] on rank 1 and torch.float32 of shape [2] on rank 2" in second


@on_ranks(2)
def test_groups_are_checked_as_in_horovod() -> None:
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

    def distribute(**arguments: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0), **arguments)

    for wrong, text in [
        (0, "groups should be a non-negative integer or a list of list"),
        (-1, "groups should be a non-negative integer or a list of list"),
        ([[p, 1]], "groups must consist of torch.Tensor"),
        ([[p], [p]], "A parameter can only appear once in groups"),
    ]:
        with pytest.raises(ValueError, match=text):
            distribute(groups=wrong)
    with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`"):
        optimizer = distribute(num_groups=2)
    for _ in range(3):
        optimizer.zero_grad()
        (p.sum() + q.sum() * hvd.rank()).backward()
        optimizer.step()
    for groups in (1, [[p, q]], [[q]]):
        distribute(groups=groups)
    assert [*p.tolist(), *q.tolist()] == [-2.0, -2.0, -0.5, -0.5]


@on_ranks(2)
def test_mistakes_leave_the_job_usable() -> None:
    with pytest.raises(ValueError, match="duplicate process set"):
        hvd.add_process_set(range(hvd.size()))
    with pytest.raises(ValueError, match="needs different ranks of 0 to 1"):
        hvd.add_process_set([0, 7])
    with pytest.raises(ValueError, match="needs different ranks of 0 to 1"):
        hvd.add_process_set([0, 0])
    with pytest.raises(ValueError, match="takes a list of ranks"):
        hvd.ProcessSet(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes a list of ranks"):
        hvd.ProcessSet([0.5])  # type: ignore[list-item]
    unknown = hvd.ProcessSet([0])
    assert unknown.size() is None
    assert unknown.rank() is None
    with pytest.raises(InvalidUsage, match="not registered"):
        hvd.barrier(process_set=unknown)
    with pytest.raises(ModelMismatch, match="add_process_set"):
        hvd.add_process_set([hvd.rank()])
    assert hvd.allreduce(torch.tensor(1), op=hvd.Sum).item() == 2


def body_mismatch_in_a_set() -> str:
    pair = hvd.add_process_set([0, 2])
    message = ""
    if hvd.rank() in pair.ranks:
        with pytest.raises(ModelMismatch) as caught:
            hvd.allreduce(torch.ones(1 + hvd.rank()), name="x", process_set=pair)
        message = str(caught.value)
    hvd.remove_process_set(pair)
    return message


def test_a_mismatch_names_the_ranks_of_the_job(ranks: RankFactory) -> None:
    first, second, third = ranks(3).run(body_mismatch_in_a_set)
    assert first == third
    assert "rank 0: allreduce.x float32 [1]" in first
    assert "rank 2: allreduce.x float32 [3]" in first
    assert second == ""


@on_ranks(2)
def test_sets_given_to_init() -> None:
    hvd.shutdown()
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=sets)
    mine = sets[hvd.rank()]
    assert hvd.allreduce(torch.tensor(5), op=hvd.Sum, process_set=mine).item() == 5
    numbers = [one.process_set_id for one in sets]
    hvd.shutdown()
    assert all(one.process_set_id is None for one in sets)
    hvd.init(process_sets="dynamic")
    hvd.remove_process_set(hvd.add_process_set([0]))
    assert numbers == [1, 2]
