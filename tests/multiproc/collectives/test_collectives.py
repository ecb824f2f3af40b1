"""Collectives on real processes: every value has a closed form, every mistake a message."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.flags import await_flag, raise_flag
from helpers.ranks import RankFactory, RankPool

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage, ModelMismatch, TransferTimeout
from hvd_order.engine.job import process
from hvd_order.engine.requests.queues import collective_queue

SIZES = [1, 2, 3]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
SHAPES = [(), (1,), (0,), (17,), (3, 0), (2, 3, 4)]


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Small numbers that differ from rank to rank; every dtype holds their sums and products."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return ((torch.arange(count) % 3) + rank + 1).to(dtype).reshape(shape)


# ---- allreduce ----


def body_allreduce() -> int:
    checked = 0
    for dtype in [*FLOATS, *INTEGERS, *COMPLEX]:
        for shape in SHAPES:
            parts = torch.stack([values(shape, torch.float64, rank) for rank in range(hvd.size())])
            expected = {
                hvd.Sum: parts.sum(0),
                hvd.Average: parts.sum(0) / hvd.size(),
                hvd.Min: parts.amin(0),
                hvd.Max: parts.amax(0),
                hvd.Product: parts.prod(0),
            }
            for op, result in expected.items():
                if dtype.is_complex and op not in (hvd.Sum, hvd.Average):
                    continue
                mine = values(shape, dtype, hvd.rank())
                before = mine.clone()
                got = hvd.allreduce(mine, op=op)
                wanted = result.trunc().to(dtype) if dtype in INTEGERS else result.to(dtype)
                torch.testing.assert_close(
                    got, wanted, rtol=1e-2 if dtype in FLOATS[:2] else 1e-6, atol=0
                )
                torch.testing.assert_close(mine, before, rtol=0, atol=0)
                assert hvd.allreduce_(mine, op=op) is mine
                torch.testing.assert_close(mine, got, rtol=0, atol=0)
                checked += 1
    return checked


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_of_every_dtype_shape_and_op(ranks: RankFactory, size: int) -> None:
    assert ranks(size).run(body_allreduce) == [9 * 6 * 5 + 2 * 6 * 2] * size


def body_scale() -> tuple[list[float], list[int], list[int], list[int]]:
    size = hvd.size()
    floats = hvd.allreduce(
        torch.tensor([1.0, 2.0]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
    )
    integers = hvd.allreduce(torch.tensor([3, -3]), op=hvd.Sum, prescale_factor=0.5)
    negative = hvd.allreduce(torch.tensor([-7 if hvd.rank() == 0 else 0, 49]))
    large = hvd.allreduce(torch.tensor([2**62 // size]), op=hvd.Sum)
    return floats.tolist(), integers.tolist(), negative.tolist(), large.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_scaling_and_averaging_of_integers_truncate(ranks: RankFactory, size: int) -> None:
    floats, integers, negative, large = ranks(size).run(body_scale)[0]
    assert floats == [2.0 * size, 4.0 * size]
    assert integers == [size, -size]
    assert negative == [-(7 // size), 49]
    assert large == [2**62 // size * size], "no detour through floating point"


def body_layouts() -> None:
    rank, size = hvd.rank(), hvd.size()
    base = torch.arange(12.0).reshape(3, 4) + rank
    total = torch.arange(12.0).reshape(3, 4) * size + sum(range(size))
    assert torch.equal(hvd.allreduce(base.t(), op=hvd.Sum), total.t())
    strided = base.clone()[:, ::2]
    assert not strided.is_contiguous()
    assert hvd.allreduce_(strided, op=hvd.Sum) is strided
    assert torch.equal(strided, total[:, ::2])
    parameter = torch.nn.Parameter(base.clone())
    assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
    assert torch.equal(parameter.detach(), total)
    assert parameter.is_leaf
    assert hvd.allreduce(torch.tensor(True), op=hvd.Max).item() is True


@pytest.mark.parametrize("size", SIZES)
def test_views_and_parameters(ranks: RankFactory, size: int) -> None:
    ranks(size).run(body_layouts)


def body_compression() -> list[tuple[torch.dtype, float]]:
    third = torch.tensor(1 / 3, dtype=torch.float64)
    results = []
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(third, compression=compression)
        results.append((result.dtype, abs(result.item() - 1 / 3)))
    assert hvd.allreduce(torch.tensor(7), compression=hvd.Compression.fp16).item() == 7
    return results


@pytest.mark.parametrize("size", SIZES)
def test_compression_gives_the_dtype_back_with_its_error(ranks: RankFactory, size: int) -> None:
    (none, fp16, bf16) = ranks(size).run(body_compression)[0]
    assert none[0] is fp16[0] is bf16[0] is torch.float64
    assert none[1] < 1e-15
    assert 1e-6 < fp16[1] < 2**-11
    assert 1e-5 < bf16[1] < 2**-8


def body_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.full((2,), float(rank), requires_grad=True)
    y = hvd.allreduce(x, op=hvd.Sum)
    assert y.tolist() == [sum(range(size))] * 2
    (y * (rank + 1)).sum().backward()  # the incoming gradients are 1, 2, ..., size
    assert x.grad is not None
    assert x.grad.tolist() == [size * (size + 1) / 2] * 2

    x = torch.full((rank + 1, 2), float(rank), requires_grad=True)
    y = hvd.allgather(x)
    weights = torch.arange(float(y.shape[0]))[:, None]
    (y * weights).sum().backward()  # the same on all ranks, so the average is the weight itself
    first = sum(range(rank + 1))
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == list(range(first, first + rank + 1))

    x = torch.full((2,), float(rank), requires_grad=True)
    y = hvd.broadcast(x, root_rank=size - 1)
    (y * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [(size + 1) / 2 if rank == size - 1 else 0.0] * 2

    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_horovods(ranks: RankFactory, size: int) -> None:
    ranks(size).run(body_gradients)


# ---- allgather and broadcast ----


def body_allgather() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]:
        for rest in [(), (1,), (2, 3), (0,)]:
            for rows in (lambda r: 2, lambda r: r, lambda r: 2 if r == 0 else 0, lambda r: 0):
                mine = torch.full((rows(rank), *rest), rank + 1).to(dtype)
                wanted = torch.cat(
                    [torch.full((rows(r), *rest), r + 1).to(dtype) for r in range(size)]
                )
                got = hvd.allgather(mine)
                assert got.dtype is dtype
                assert got.shape == wanted.shape
                assert torch.equal(got, wanted)
    assert hvd.allgather(torch.tensor(rank)).tolist() == list(range(size))
    transposed = torch.arange(6).reshape(2, 3).t() + rank
    assert torch.equal(
        hvd.allgather(transposed),
        torch.cat([torch.arange(6).reshape(2, 3).t() + r for r in range(size)]),
    )


@pytest.mark.parametrize("size", SIZES)
def test_allgather_of_uneven_and_empty_rows(ranks: RankFactory, size: int) -> None:
    ranks(size).run(body_allgather)


def body_broadcast() -> None:
    rank, size = hvd.rank(), hvd.size()
    for root in range(size):
        for dtype in [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]:
            for shape in SHAPES:
                mine = values(shape, dtype, rank)
                got = hvd.broadcast(mine, root)
                assert torch.equal(got, values(shape, dtype, root))
                assert torch.equal(mine, values(shape, dtype, rank))
                assert hvd.broadcast_(mine, root) is mine
                assert torch.equal(mine, got)
    view = torch.arange(12.0).reshape(3, 4)[:, 1] + rank
    hvd.broadcast_(view, size - 1)
    assert torch.equal(view, torch.arange(12.0).reshape(3, 4)[:, 1] + size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_from_every_root(ranks: RankFactory, size: int) -> None:
    ranks(size).run(body_broadcast)


# ---- handles ----


def body_handles() -> None:
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


@pytest.mark.parametrize("size", SIZES)
def test_handles(ranks: RankFactory, size: int) -> None:
    ranks(size).run(body_handles)


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


def body_duplicate_name(refused: str) -> None:
    if hvd.rank() == 0:
        first = hvd.allreduce_async(torch.ones(1), name="same")
        with pytest.raises(ValueError, match=r"allreduce\.same is already in flight"):
            hvd.allreduce_async(torch.ones(1), name="same")
        gathered = hvd.allgather_async(torch.ones(1), name="same")  # another operation is fine
        raise_flag(refused)
    else:
        await_flag(refused)
        first = hvd.allreduce_async(torch.ones(1), name="same")
        gathered = hvd.allgather_async(torch.ones(1), name="same")
    assert hvd.synchronize(first).item() == 1.0
    assert hvd.synchronize(gathered).tolist() == [1.0] * hvd.size()
    assert hvd.allreduce(torch.ones(1), name="same").item() == 1.0  # done, so it may be used again


def test_a_name_in_flight_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(body_duplicate_name, str(tmp_path / "refused"))


# ---- mistakes ----


def body_mismatch(kind: str) -> tuple[str, str]:
    odd = hvd.rank() == hvd.size() - 1
    x = torch.ones(2, 3)
    try:
        if kind == "shape":
            hvd.allreduce(torch.ones(3, 2) if odd else x, name="x")
        elif kind == "dtype":
            hvd.allreduce(x.double() if odd else x, name="x")
        elif kind == "op":
            hvd.allreduce(x, name="x", op=hvd.Max if odd else hvd.Sum)
        elif kind == "scale":
            hvd.allreduce(x, name="x", prescale_factor=0.5 if odd else 1.0)
        elif kind == "collective":
            if odd:
                hvd.allgather(x)
            else:
                hvd.allreduce(x)
        elif kind == "root":
            hvd.broadcast_(x, 1 if odd else 0, name="x")
        elif kind == "rows":
            hvd.allgather(torch.ones(2, 4) if odd else x, name="x")
    except hvd.HorovodInternalError as error:
        message = (type(error).__name__, str(error))
    else:
        message = ("nothing was raised", "")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size(), "still in step"
    return message


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
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree_all_get_the_same_message(
    ranks: RankFactory, size: int, kind: str, this: str, that: str
) -> None:
    messages = ranks(size).run(body_mismatch, kind)
    assert messages == [messages[0]] * size
    name, text = messages[0]
    assert name == "ModelMismatch"
    left, right = text.split(f"; rank {size - 1}: ")
    assert this in left + ";"
    assert that in right


def body_arguments() -> None:
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
    assert (
        hvd.allreduce(x, op=hvd.Sum, process_set=hvd.global_process_set).tolist()
        == [hvd.size()] * 2
    )


@pytest.mark.parametrize("size", SIZES)
def test_wrong_arguments(ranks: RankFactory, size: int) -> None:
    ranks(size).run(body_arguments)


def failed_allreduce(name: str) -> str:
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(1), name=name)
    return caught.type.__name__


def body_absent_rank(timeout_s: float, failed: str) -> tuple[float, list[str]]:
    """Rank 1 does not take part; the others must not wait longer than the timeout."""
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_ORDER_TIMEOUT", str(timeout_s))
        patch.setenv("HVD_ORDER_STALL_WARNING", "0.5")
        hvd.init()
    errors = []
    start = time.monotonic()
    if hvd.rank() != 1:
        with pytest.warns(RuntimeWarning, match=r"has waited 0\.5 s for allreduce\.x"):
            errors.append(failed_allreduce("x"))
        # The ranks are out of step now: no second wait, and no wrong result.
        errors.append(failed_allreduce("y"))
        raise_flag(f"{failed}{hvd.rank()}")
    else:
        for rank in (0, 2):
            await_flag(f"{failed}{rank}")
    took = time.monotonic() - start
    hvd.shutdown()
    return took, errors


def test_a_rank_that_does_not_come_is_an_error_in_time(
    three_ranks: RankPool, tmp_path: Path
) -> None:
    results = three_ranks.run(body_absent_rank, 2.0, str(tmp_path / "failed"))
    for rank in (0, 2):
        took, errors = results[rank]
        assert took < 8.0
        assert len(errors) == 2
        assert set(errors) <= {"TransferTimeout", "PeerLost"}
    assert any("TransferTimeout" in errors for _, errors in results)


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


def test_the_errors_are_horovods() -> None:
    assert issubclass(ModelMismatch, hvd.HorovodInternalError)
    assert issubclass(TransferTimeout, hvd.HorovodInternalError)
