"""Collectives that ranks call in different order meet by their names, as in Horovod."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import new_job
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory, RankPool

import hvd_order.torch as hvd
from hvd_order.base.errors import ModelMismatch, PeerLost
from hvd_order.engine.requests.queues import collective_queue
from hvd_order.engine.requests.request import Request


def body_shuffled(seed: int) -> None:
    """Every rank starts the same collectives, each in an order of its own."""
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) / 2
    starts: dict[str, Any] = {}
    wanted: dict[str, list[float]] = {}
    for i in range(9):
        x = torch.full((i + 1,), float(rank + 1))
        starts[f"r{i}"] = lambda x=x, i=i: hvd.allreduce_async(x, name=f"r{i}", op=hvd.Sum)
        wanted[f"r{i}"] = [total] * (i + 1)
        starts[f"i{i}"] = lambda x=x, i=i: hvd.allreduce_async_(x.clone(), name=f"i{i}", op=hvd.Max)
        wanted[f"i{i}"] = [float(size)] * (i + 1)
        starts[f"g{i}"] = lambda i=i: hvd.allgather_async(torch.tensor([rank + i]), name=f"g{i}")
        wanted[f"g{i}"] = [float(r + i) for r in range(size)]
        starts[f"b{i}"] = lambda x=x, i=i: hvd.broadcast_async(x, i % size, name=f"b{i}")
        wanted[f"b{i}"] = [float(i % size + 1)] * (i + 1)
        starts[f"l{i}"] = lambda x=x, i=i: hvd.grouped_allreduce_async(
            [x, x.double()], name=f"l{i}", op=hvd.Sum
        )
        wanted[f"l{i}"] = [total] * (i + 1)
    names = list(starts)
    random.Random(seed + rank).shuffle(names)
    handles = {name: starts[name]() for name in names}
    random.Random(seed - rank).shuffle(names)
    for name in names:
        result = hvd.synchronize(handles[name])
        for one in result if isinstance(result, list) else [result]:
            assert one.tolist() == wanted[name], name


def test_every_rank_in_its_own_order(three_ranks: RankPool) -> None:
    for seed in (1, 50):
        three_ranks.run(body_shuffled, seed)


@on_ranks(3)
def test_blocking_calls_in_several_threads() -> None:
    """Blocking calls in threads that no rank runs in the same order."""

    def work(i: int) -> None:
        time.sleep(0.01 * ((i * (hvd.rank() + 3)) % 5))
        results[i] = hvd.allreduce(torch.tensor(float(i)), name=f"t{i}").item()

    results = [-1.0] * 8
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [float(i) for i in range(8)]


def body_mismatch() -> list[str]:
    """One of three requests differs; the others are not affected."""
    names = ["a", "bad", "c"] if hvd.rank() == 0 else ["c", "bad", "a"]
    shape = 3 if hvd.rank() == 0 else 2
    sizes = {"a": 1, "bad": shape, "c": 2}
    handles = {name: hvd.allreduce_async(torch.ones(sizes[name]), name=name) for name in names}
    assert hvd.synchronize(handles["c"]).tolist() == [1.0] * 2
    with pytest.raises(ModelMismatch) as caught:
        hvd.synchronize(handles["bad"])
    assert hvd.synchronize(handles["a"]).tolist() == [1.0]
    with pytest.raises(ModelMismatch) as grouped:
        hvd.grouped_allreduce([torch.ones(2), torch.ones(shape)], name="g")
    return [str(caught.value), str(grouped.value)]


def test_a_mismatch_concerns_one_name(ranks: RankFactory) -> None:
    first, second, third = ranks(3).run(body_mismatch)
    assert first == second == third
    assert "rank 0: allreduce.bad float32 [3]" in first[0]
    assert "ranks 1, 2: allreduce.bad float32 [2]" in first[0]
    assert "rank 0: [1] float32 [3]" in first[1]


def body_missing() -> tuple[str, str, float]:
    """Rank 1 calls 'y' where the others call 'x'; then the ranks are out of step."""
    with new_job({"HVD_ORDER_TIMEOUT": "10", "HVD_ORDER_STALL_WARNING": "0.5"}):
        name = "y" if hvd.rank() == 1 else "x"
        start = time.monotonic()
        with (
            pytest.warns(RuntimeWarning, match="has waited 0.5 s for") as warned,
            pytest.raises(hvd.HorovodInternalError) as caught,
        ):
            hvd.allreduce(torch.ones(1), name=name)
        with pytest.raises(hvd.HorovodInternalError):  # no second wait, and no wrong result
            hvd.allreduce(torch.ones(1), name="z")
        took = time.monotonic() - start
    return f"{caught.type.__name__}: {caught.value}", str(warned[0].message), took


def test_a_request_that_never_comes_is_named_with_its_ranks(ranks: RankFactory) -> None:
    results = ranks(3).run(body_missing)
    texts = {text for text, _, _ in results}
    assert len(texts) == 1, "all ranks have the same error"
    text = texts.pop()
    assert text.startswith("TransferTimeout: allreduce.")
    assert (
        "allreduce.x was not called on rank 1 within 10 s" in text
        or "allreduce.y was not called on ranks 0, 2 within 10 s" in text
    )
    assert results[0][1] == "rank 0 has waited 0.5 s for allreduce.x: rank 1 has not called it"
    assert results[1][1] == "rank 1 has waited 0.5 s for allreduce.y: ranks 0, 2 have not called it"
    assert all(took < 20 for _, _, took in results)


@on_ranks(2)
def test_what_has_its_turn_may_take_many_transfers() -> None:
    """Each ends within the timeout, all together do not; nobody waits in a busy loop."""

    def many_transfers(group: dist.ProcessGroup | None) -> None:
        for _ in range(9):
            time.sleep(0.5)
            dist.all_reduce(torch.ones(1), group=group)

    with new_job({"HVD_ORDER_TIMEOUT": "4", "HVD_ORDER_STALL_WARNING": "0.5"}):
        used_s = time.process_time()
        with pytest.warns(RuntimeWarning, match="its transfer takes long"):
            collective_queue().run(
                Request("long", ["long"], many_transfers, lambda: None, torch.device("cpu"))
            )
        used_s = time.process_time() - used_s
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    assert used_s < 0.5


@on_ranks(2, timeout=10.0)
def test_a_rank_that_has_shut_down_is_named_at_once() -> None:
    if hvd.rank() == 0:
        with pytest.raises(PeerLost, match=r"^rank 1 has shut down; with fewer batches"):
            hvd.allreduce(torch.ones(1), name="x")
    hvd.shutdown()
    hvd.init()
