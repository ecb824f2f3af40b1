"""Collectives among some of the ranks, while others do something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import RankFactory, RankPool

import hvd_order.torch as hvd
from hvd_order.errors import InvalidUsage, ModelMismatch


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


def body_gradients() -> None:
    rank = hvd.rank()
    pair = hvd.add_process_set([1, 2])
    if rank in pair.ranks:
        for collective, wanted in [
            (lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=pair), 5.0),
            (lambda x: hvd.allgather(x, process_set=pair), 2.5),
            (lambda x: hvd.broadcast(x, 2, process_set=pair), 2.5 if rank == 2 else 0.0),
        ]:
            x = torch.ones(rank, requires_grad=True) if "allgather" in str(
                collective.__code__.co_names
            ) else torch.ones(2, requires_grad=True)  # fmt: skip
            (collective(x) * (rank + 1)).sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == [wanted] * len(x)
    hvd.remove_process_set(pair)


def test_gradients_stay_in_the_set(ranks: RankFactory) -> None:
    ranks(3).run(body_gradients)


def body_mistakes() -> list[str]:
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
    with pytest.raises(ModelMismatch, match="add_process_set") as caught:
        hvd.add_process_set([hvd.rank()])
    assert hvd.allreduce(torch.tensor(1), op=hvd.Sum).item() == 2
    return [str(caught.value)]


def test_mistakes_leave_the_job_usable(two_ranks: RankPool) -> None:
    two_ranks.run(body_mistakes)


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


def body_static() -> list[int | None]:
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
    return numbers


def test_sets_given_to_init(two_ranks: RankPool) -> None:
    assert two_ranks.run(body_static) == [[1, 2], [1, 2]]
