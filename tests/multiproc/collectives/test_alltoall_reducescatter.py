"""alltoall, reducescatter and the grouped collectives: values have closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import RankFactory, RankPool

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage, ModelMismatch

SIZES = [1, 2, 3]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
OTHER_DIMENSIONS: list[tuple[int, ...]] = [(), (3,), (2, 2), (0,)]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    rtol = 1e-2 if got.dtype in FLOATS[:2] else 1e-6
    torch.testing.assert_close(got, wanted.to(got.dtype), rtol=rtol, atol=0)


# ---- alltoall ----


def rows_of(sender: int, receiver: int, other: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What goes from one rank to another: ``receiver + sender`` rows of one number."""
    return torch.full((receiver + sender, *other), 10 * sender + receiver).to(dtype)


def body_alltoall() -> int:
    rank, size = hvd.rank(), hvd.size()
    checked = 0
    for dtype in [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]:
        for other in OTHER_DIMENSIONS:
            mine = torch.cat([rows_of(rank, to, other, dtype) for to in range(size)])
            splits = [rank + to for to in range(size)]
            wanted = torch.cat([rows_of(by, rank, other, dtype) for by in range(size)])
            rows, received = hvd.alltoall(mine, splits)
            assert torch.equal(rows, wanted)
            assert rows.dtype is dtype
            assert received.tolist() == [by + rank for by in range(size)]
            assert received.dtype is torch.int32
            rows, received = hvd.alltoall(mine, torch.tensor(splits, dtype=torch.int64))
            assert received.dtype is torch.int64
            even = torch.arange(2 * size).to(dtype) + (0 if dtype is torch.bool else rank)
            got = hvd.alltoall(even)
            parts = [(torch.arange(2 * size).to(dtype) + (0 if dtype is torch.bool else by))
                     [2 * rank : 2 * rank + 2] for by in range(size)]  # fmt: skip
            assert torch.equal(got, torch.cat(parts))
            checked += 1
    return checked


@pytest.mark.parametrize("size", SIZES)
def test_alltoall_of_every_dtype_and_shape(ranks: RankFactory, size: int) -> None:
    assert ranks(size).run(body_alltoall) == [12 * 4] * size


def body_alltoall_gradient() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.randn(rank + 1, 2, requires_grad=True)
    splits = [0] * size
    splits[(rank + 1) % size] = rank + 1  # all rows go to the next rank
    rows, received = hvd.alltoall(mine, splits)
    assert not received.requires_grad
    (rows * (rank + 1)).sum().backward()
    assert torch.equal(mine.grad, torch.full((rank + 1, 2), float((rank + 1) % size + 1)))


@pytest.mark.parametrize("size", SIZES)
def test_gradients_go_back_where_the_rows_came_from(ranks: RankFactory, size: int) -> None:
    ranks(size).run(body_alltoall_gradient)


def body_alltoall_async() -> tuple[list[int], list[int]]:
    mine = torch.arange(hvd.size())
    handle = hvd.alltoall_async(mine, name="turn")
    mine.zero_()  # the tensor was read at once
    rows, received = hvd.synchronize(handle)
    return rows.tolist(), received.tolist()


def test_alltoall_async_always_returns_both(two_ranks: RankPool) -> None:
    assert two_ranks.run(body_alltoall_async) == [([0, 0], [1, 1]), ([1, 1], [1, 1])]


def body_alltoall_mistakes() -> list[str]:
    messages = []
    for tensor, splits in [
        (torch.arange(3), None),
        (torch.arange(3), [1, 1]),
        (torch.arange(3), [4, -1]),
        (torch.arange(3), [3]),
        (torch.tensor(1.0), None),
    ]:
        with pytest.raises(InvalidUsage) as caught:
            hvd.alltoall(tensor, splits)
        messages.append(str(caught.value))
    return messages


def test_splits_that_do_not_fit_are_refused(two_ranks: RankPool) -> None:
    messages = two_ranks.run(body_alltoall_mistakes)[0]
    assert "2 ranks do not divide" in messages[0]
    assert all("add up to the first dimension, 3" in message for message in messages[1:4])
    assert "use allgather" in messages[4]


# ---- reducescatter ----


def body_reducescatter() -> int:
    rank, size = hvd.rank(), hvd.size()
    checked = 0
    for dtype in [*FLOATS, *INTEGERS, *COMPLEX]:
        for rows in (size, 0, 1, 2 * size + 1):
            for other in OTHER_DIMENSIONS:
                shape = (rows, *other)
                count = torch.Size(shape).numel()
                parts = torch.stack([
                    ((torch.arange(count) % 3) + by + 1).reshape(shape).to(torch.float64)
                    for by in range(size)
                ])  # fmt: skip
                share, over = divmod(rows, size)
                first = rank * share + min(rank, over)
                mine = slice(first, first + share + (rank < over))
                for op, wanted in {
                    hvd.Sum: parts.sum(0), hvd.Average: parts.sum(0) / size,
                    hvd.Min: parts.amin(0), hvd.Max: parts.amax(0), hvd.Product: parts.prod(0),
                }.items():  # fmt: skip
                    if dtype.is_complex and op not in (hvd.Sum, hvd.Average):
                        continue
                    tensor = parts[rank].to(dtype)
                    got = hvd.reducescatter(tensor, op=op)
                    close(got, (wanted.trunc() if dtype in INTEGERS else wanted)[mine])
                    assert torch.equal(tensor, parts[rank].to(dtype))
                    checked += 1
    return checked


@pytest.mark.parametrize("size", SIZES)
def test_reducescatter_of_every_dtype_shape_and_op(ranks: RankFactory, size: int) -> None:
    assert ranks(size).run(body_reducescatter) == [(9 * 5 + 2 * 2) * 16] * size


def body_reducescatter_more() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.arange(float(size)) + 1
    got = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert got.tolist() == [2.0 * size * (rank + 1)]
    half = hvd.reducescatter(tensor, compression=hvd.Compression.fp16)
    assert (half.dtype, half.tolist()) == (torch.float32, [rank + 1.0])
    for op, factor in [(hvd.Average, 1.0), (hvd.Sum, float(size))]:
        leaf = tensor.clone().requires_grad_()
        (hvd.reducescatter(leaf, op=op) * (rank + 1)).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [factor * (r + 1) for r in range(size)]
    with pytest.raises(InvalidUsage, match="no rows to scatter"):
        hvd.reducescatter(torch.tensor(1.0))


@pytest.mark.parametrize("size", SIZES)
def test_reducescatter_scales_compresses_and_differentiates(ranks: RankFactory, size: int) -> None:
    ranks(size).run(body_reducescatter_more)


# ---- groups ----


def group() -> list[torch.Tensor]:
    rank = hvd.rank()
    return [
        torch.full((2, 3), rank + 1.0),
        torch.full((), rank + 2.0),
        torch.full((5,), rank + 1),
        torch.full((0, 2), 1.0, dtype=torch.float64),
        torch.full((3, 2), rank + 1.0)[:, :1],
    ]


def body_grouped_allreduce() -> None:
    size = hvd.size()
    mean = (size + 1) / 2
    wanted = [mean, mean + 1, float(int(mean)), 0.0, mean]
    tensors = group()
    for results in (
        hvd.grouped_allreduce(tensors),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors, name="g")),
    ):
        for tensor, result, value in zip(tensors, results, wanted, strict=True):
            assert (result.shape, result.dtype) == (tensor.shape, tensor.dtype)
            assert (result == value).all()
    assert torch.equal(tensors[0], group()[0])
    summed = hvd.grouped_allreduce_(tensors, op=hvd.Sum, postscale_factor=2.0)
    assert all(a is b for a, b in zip(tensors, summed, strict=True))
    assert tensors[0][0, 0].item() == 2 * sum(range(1, size + 1))
    handle = hvd.grouped_allreduce_async_(group()[:2], op=hvd.Max)
    assert [t.flatten()[0].item() for t in hvd.synchronize(handle)] == [size, size + 1.0]
    leaves = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    a, b = hvd.grouped_allreduce(leaves, compression=hvd.Compression.fp16)
    ((hvd.rank() + 1) * (a.sum() + 2 * b.sum())).backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert leaves[0].grad.tolist() == [mean] * 2
    assert leaves[1].grad.tolist() == [2 * mean] * 3


@pytest.mark.parametrize("size", SIZES)
def test_grouped_allreduce(ranks: RankFactory, size: int) -> None:
    ranks(size).run(body_grouped_allreduce)


def body_grouped_rows() -> None:
    rank, size = hvd.rank(), hvd.size()
    uneven = [torch.full((rank + 1, 2), float(rank)), torch.tensor(rank)]
    rows, scalars = hvd.grouped_allgather(uneven)
    assert rows[:, 0].tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    assert scalars.tolist() == list(range(size))
    leaves = [torch.ones(rank + 1, requires_grad=True), torch.ones((), requires_grad=True)]
    a, b = hvd.grouped_allgather(leaves)
    ((rank + 1) * (a.sum() + b.sum())).backward()
    mean = (size + 1) / 2
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert leaves[0].grad.tolist() == [mean] * (rank + 1)
    assert leaves[1].grad.item() == mean

    tensors = [torch.arange(float(size)), torch.ones(2 * size, 3, dtype=torch.int64)]
    parts = hvd.grouped_reducescatter(tensors, op=hvd.Sum)
    assert parts[0].tolist() == [size * float(rank)]
    assert torch.equal(parts[1], torch.full((2, 3), size))
    parts = hvd.synchronize(hvd.grouped_reducescatter_async(tensors))
    assert parts[0].tolist() == [float(rank)]
    leaf = torch.ones(size, requires_grad=True)
    (hvd.grouped_reducescatter([leaf], op=hvd.Sum)[0] * (rank + 1)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [float(size * (r + 1)) for r in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_grouped_allgather_and_reducescatter(ranks: RankFactory, size: int) -> None:
    ranks(size).run(body_grouped_rows)


def body_group_mismatch() -> str:
    tensors = [torch.ones(2), torch.ones(3 + hvd.rank())]
    with pytest.raises(ModelMismatch) as caught:
        hvd.grouped_allreduce(tensors, name="pair")
    with pytest.raises(InvalidUsage, match="empty"):
        hvd.grouped_allreduce([])
    return str(caught.value)


def test_a_group_that_differs_names_the_tensor(two_ranks: RankPool) -> None:
    for message in two_ranks.run(body_group_mismatch):
        assert "grouped_allreduce.pair" in message
        assert "[1] float32 [3]" in message
        assert "[1] float32 [4]" in message


# ---- sparse ----


def body_sparse() -> tuple[Any, Any]:
    rank = hvd.rank()
    mine = torch.sparse_coo_tensor([[rank, 2]], [[1.0, 2.0], [3.0, 4.0]], (4, 2))
    results = []
    for op in (hvd.Sum, hvd.Average):
        wait = hvd.sparse_allreduce_async(mine, name="rows", op=op)
        result = wait()
        assert result.is_sparse
        results.append(result.to_dense().tolist())
    with pytest.raises(InvalidUsage, match="dense"):
        hvd.sparse_allreduce_async(mine.to_dense(), name="rows", op=hvd.Sum)
    with pytest.raises(InvalidUsage, match=r"hvd\.Max"):
        hvd.sparse_allreduce_async(mine, name="rows", op=hvd.Max)
    return results[0], results[1]


@pytest.mark.parametrize("size", SIZES)
def test_sparse_allreduce(ranks: RankFactory, size: int) -> None:
    wanted = torch.zeros(4, 2)
    for rank in range(size):
        wanted[rank] += torch.tensor([1.0, 2.0])
        wanted[2] += torch.tensor([3.0, 4.0])
    for summed, averaged in ranks(size).run(body_sparse):
        assert torch.equal(torch.tensor(summed), wanted)
        torch.testing.assert_close(torch.tensor(averaged), wanted / size)
