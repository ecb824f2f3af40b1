"""Collectives on real processes: handles, and what mistakes say.

Values of every collective, dtype, shape and form are in tests/reference, those of one rank and of
complex numbers in test_array.py as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.flags import await_flag, raise_flag
from helpers.on_ranks import on_ranks
from helpers.ranks import RankPool

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.job import process
from hvd_order.engine.requests.queues import collective_queue

SIZES = [1, 2, 3]


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_what_the_reference_has_not() -> None:
    """What Horovod has not: large integers, parameters, bfloat16, groups of mixed layouts."""
    rank, size = hvd.rank(), hvd.size()
    large = hvd.allreduce(torch.tensor([2**62 // size]), op=hvd.Sum)
    assert large.item() == 2**62 // size * size, "no detour through floating point"
    parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
    assert parameter.is_leaf
    assert parameter.flatten().tolist() == [float(sum(range(size)))] * 6
    assert hvd.allreduce(torch.tensor(True), op=hvd.Max).item() is True
    third = torch.tensor(1 / 3, dtype=torch.float64)
    for compression, least, most in (("none", 0.0, 1e-15), ("fp16", 1e-6, 2**-11),
                                     ("bf16", 1e-5, 2**-8)):  # fmt: skip
        result = hvd.allreduce(third, compression=getattr(hvd.Compression, compression))
        assert result.dtype is torch.float64
        assert least <= abs(result.item() - 1 / 3) < most
    large = torch.tensor(2.0**20, dtype=torch.bfloat16)  # more than float16 holds
    assert hvd.allreduce(large, compression=hvd.Compression.fp16).item() == 2.0**20
    exact = torch.tensor(1 + 2.0**-10, dtype=torch.float16)  # finer than bfloat16
    assert hvd.allreduce(exact, compression=hvd.Compression.bf16).item() == 1 + 2.0**-10
    group = [torch.full((3, 2), rank + 1.0)[:, :1], torch.full((), rank + 1), torch.ones(0, 2)]
    results = hvd.synchronize(hvd.grouped_allreduce_async(group, op=hvd.Sum, name="g"))
    total = size * (size + 1) // 2
    for tensor, result in zip(group, results, strict=True):
        assert (result.shape, result.dtype) == (tensor.shape, tensor.dtype)
        assert (result == total).all()
    rows, numbers = hvd.grouped_allgather([torch.full((rank + 1,), rank), torch.tensor(rank)])
    assert rows.tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert numbers.tolist() == list(range(size))
    leaf = torch.ones(size, requires_grad=True)
    (hvd.grouped_reducescatter([leaf], op=hvd.Sum)[0] * (rank + 1)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [float(size * (r + 1)) for r in range(size)]


# ---- handles ----


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_handles() -> None:
    tensors = [torch.full((1000,), float(i + hvd.rank())) for i in range(20)]
    handles = [hvd.allreduce_async(t, name=f"t{i}", op=hvd.Sum) for i, t in enumerate(tensors)]
    assert len(set(handles)) == 20
    assert all(isinstance(handle, int) for handle in handles)
    for tensor in tensors:
        tensor.zero_()  # the input was read when the call returned
    offset = sum(range(hvd.size()))
    for i in reversed(range(20)):  # waited for in any order
        result = hvd.synchronize(handles[i])
        assert result.tolist() == [float(i * hvd.size() + offset)] * 1000
        assert hvd.synchronize(handles[i]) is None
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(handles[0])
    handle = hvd.broadcast_async_(tensors[0], 0)
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert hvd.synchronize(handle) is tensors[0]
    hvd.barrier()


def body_late_rank(polled: str) -> bool:
    """An asynchronous call returns, and is not done, while another rank has not called it."""
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1))
        early = hvd.poll(handle)
        raise_flag(polled)
        hvd.synchronize(handle)
        return early
    await_flag(polled)
    hvd.allreduce(torch.ones(1))
    return False


def test_asynchronous_calls_do_not_wait_for_other_ranks(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    assert two_ranks.run(body_late_rank, str(tmp_path / "polled")) == [False, False]


# ---- mistakes ----


def body_mismatch(kind: str) -> tuple[str, str]:
    odd = hvd.rank() == hvd.size() - 1
    x = torch.ones(2, 3)
    calls: dict[str, Callable[[], object]] = {
        "shape": lambda: hvd.allreduce(torch.ones(3, 2) if odd else x, name="x"),
        "dtype": lambda: hvd.allreduce(x.double() if odd else x, name="x"),
        "op": lambda: hvd.allreduce(x, name="x", op=hvd.Max if odd else hvd.Sum),
        "scale": lambda: hvd.allreduce(x, name="x", prescale_factor=0.5 if odd else 1.0),
        "collective": lambda: hvd.allgather(x) if odd else hvd.allreduce(x),
        "root": lambda: hvd.broadcast_(x, 1 if odd else 0, name="x"),
        "rows": lambda: hvd.allgather(torch.ones(2, 4) if odd else x, name="x"),
    }
    with pytest.raises(hvd.HorovodInternalError) as raised:
        calls[kind]()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size(), "still in step"
    return raised.type.__name__, str(raised.value)


@pytest.mark.parametrize(
    ("kind", "this", "that"),
    [
        ("shape", "allreduce.x float32 [2, 3]", "allreduce.x float32 [3, 2]"),
        ("dtype", "allreduce.x float32 [2, 3]", "allreduce.x float64 [2, 3]"),
        ("op", "op=Sum", "op=Max"),
        ("scale", "op=Average;", "prescale_factor=0.5"),
        ("collective", "allreduce.noname.", "allgather.noname."),
        ("root", "root_rank=0", "root_rank=1"),
        ("rows", "rows of shape [3]", "rows of shape [4]"),
    ],
)
def test_ranks_that_disagree_all_get_the_same_message(
    three_ranks: RankPool, kind: str, this: str, that: str
) -> None:
    messages = three_ranks.run(body_mismatch, kind)
    assert messages == [messages[0]] * 3
    name, text = messages[0]
    assert name == "ModelMismatch"
    left, right = text.split("; rank 2: ")
    assert this in left + ";"
    assert that in right


@on_ranks(2)
def test_wrong_arguments() -> None:
    x: Any = torch.ones(2)
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert hvd.allreduce(x, average=False).tolist() == [hvd.size()] * 2
    with pytest.raises(InvalidUsage, match="Adasum is for allreduce only"):
        hvd.reducescatter(x, op=hvd.Adasum)
    with pytest.raises(InvalidUsage, match=r"expected one of hvd\.Average"):
        hvd.allreduce(x, op=17)
    with pytest.raises(InvalidUsage, match=r"not registered; pass it to hvd\.init"):
        hvd.allreduce(x, process_set=hvd.ProcessSet([0]))
    with pytest.raises(InvalidUsage, match=r"use tensor\.to_dense"):
        hvd.allreduce(x.to_sparse())
    with pytest.raises(InvalidUsage, match="expected a tensor, got list"):
        hvd.allreduce_async([1.0])  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="cannot be averaged"):
        hvd.allreduce(torch.tensor([True]))
    with pytest.raises(InvalidUsage, match="Max is not defined"):
        hvd.allreduce(x.to(torch.complex64), op=hvd.Max)
    with pytest.raises(InvalidUsage, match="float8_e4m3fn is not supported"):
        hvd.allreduce(x.to(torch.float8_e4m3fn))
    with pytest.raises(InvalidUsage, match=f"root_rank is {hvd.size()}"):
        hvd.broadcast(x, hvd.size())
    for tensor, splits, words in (
        (torch.arange(3), None, "2 ranks do not divide"),
        (torch.arange(3), [1, 1], "add up to the first dimension, 3"),
        (torch.arange(3), [4, -1], "add up to the first dimension, 3"),
        (torch.arange(3), [3], "add up to the first dimension, 3"),
        (torch.tensor(1.0), None, "use allgather"),
    ):
        with pytest.raises(InvalidUsage, match=words):
            hvd.alltoall(tensor, splits)
    with pytest.raises(InvalidUsage, match="no rows to scatter"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(InvalidUsage, match="empty"):
        hvd.grouped_allreduce([])
    with pytest.raises(InvalidUsage, match="dense"):
        hvd.sparse_allreduce_async(x, name="rows", op=hvd.Sum)
    with pytest.raises(InvalidUsage, match=r"hvd\.Max"):
        hvd.sparse_allreduce_async(torch.eye(2).to_sparse(1), name="rows", op=hvd.Max)
    total = hvd.allreduce(x, op=hvd.Sum, process_set=hvd.global_process_set)
    assert total.tolist() == [hvd.size()] * 2


def body_shutdown_with_work_in_flight(gone: str) -> float:
    start = time.monotonic()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="never")
        queue = collective_queue()
        hvd.shutdown()
        with pytest.raises(hvd.HorovodInternalError):
            queue.synchronize(handle)
        raise_flag(gone)
    else:
        await_flag(gone)
        hvd.shutdown()
    assert not process.is_initialized()
    return time.monotonic() - start


def test_shutdown_does_not_wait_for_a_collective_nobody_joins(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    assert two_ranks.run(body_shutdown_with_work_in_flight, str(tmp_path / "gone"))[0] < 10.0
