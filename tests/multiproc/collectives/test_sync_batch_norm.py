"""Batch normalisation over all ranks gives what one process has on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.logged import logged
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory, RankPool

import hvd_order.torch as hvd

SHAPES = [(), (4, 3)]
"""What follows [N, C]."""
ROWS = [4, 1, 3]
"""Batch size of each rank."""
KINDS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"momentum": 0.4, "eps": 0.1},
    {"affine": False},
    {"track_running_stats": False},
]


def batch(shape: tuple[int, ...], turn: int) -> torch.Tensor:
    """All ranks' rows; far from zero, as statistics that cancel would show."""
    generator = torch.Generator().manual_seed(turn)
    rows = sum(ROWS[: hvd.size()])
    return torch.randn((rows, 6, *shape), generator=generator) * 3 + 50


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
@on_ranks()
def test_equal_to_one_process_on_the_whole_batch(shape: tuple[int, ...]) -> None:
    rank = hvd.rank()
    first = sum(ROWS[:rank])
    mine = slice(first, first + ROWS[rank])
    for kind in KINDS:
        sync = hvd.SyncBatchNorm(6, **kind)
        whole = torch.nn.BatchNorm1d(6, **kind)
        whole._check_input_dim = lambda x: None  # type: ignore[method-assign]
        if sync.affine:
            with torch.no_grad():
                for norm in (sync, whole):
                    norm.weight.copy_(torch.linspace(0.5, 2.0, 6))
                    norm.bias.copy_(torch.linspace(-1.0, 1.0, 6))
        for turn in range(3):
            x = batch(shape, turn).requires_grad_()
            part = x.detach()[mine].clone().requires_grad_()
            weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
            y, z = whole(x), sync(part)
            torch.testing.assert_close(z, y[mine], rtol=1e-4, atol=1e-4)
            (y.square() * weights).sum().backward()
            (z.square() * weights[mine]).sum().backward()
            assert x.grad is not None
            torch.testing.assert_close(part.grad, x.grad[mine], rtol=1e-3, atol=1e-4)
            for name, parameter in sync.named_parameters():
                wanted = whole.get_parameter(name).grad
                got = hvd.allreduce(parameter.grad, op=hvd.Sum)
                torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
            for name, buffer in sync.named_buffers():
                torch.testing.assert_close(buffer, whole.get_buffer(name), rtol=1e-5, atol=1e-5)
            sync.zero_grad()
            whole.zero_grad()
        sync.eval()
        whole.eval()
        x = batch(shape, 7)
        wanted = whole(x)[mine]  # without running statistics the batch counts in evaluation, too
        torch.testing.assert_close(sync(x[mine]), wanted, rtol=1e-4, atol=1e-4)
        assert list(sync.state_dict()) == list(whole.state_dict())


@on_ranks(2)
def test_dtypes_empty_batches_and_mistakes() -> None:
    rank = hvd.rank()
    norm = hvd.SyncBatchNorm(2)
    x = torch.tensor([[1.0, 5.0]] * 3 + [[3.0, 9.0]] * 3)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        y = norm(x[3 * rank : 3 * rank + 3].to(dtype))
        assert y.dtype is dtype
        wanted = -1.0 if rank == 0 else 1.0
        assert y.flatten().tolist() == pytest.approx([wanted] * 6, rel=1e-2)
    norm = hvd.SyncBatchNorm(2)
    empty = norm(x[:0] if rank == 1 else x)
    assert empty.shape == ((0, 2) if rank == 1 else (6, 2))
    assert norm.running_mean.tolist() == pytest.approx([0.2, 0.7])
    (empty.sum()).backward()
    with pytest.raises(ValueError, match="more than 1 value per channel when training, got 1"):
        norm(x[:0] if rank == 1 else x[:1])
    with pytest.raises(ValueError, match=r"expected at least 2D input \(got 1D input\)"):
        norm(torch.ones(2))


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), hvd.SyncBatchNorm(4), torch.nn.ReLU(),
        torch.nn.Conv2d(4, 4, 3), hvd.SyncBatchNorm(4), torch.nn.Flatten(), torch.nn.LazyLinear(2),
    )  # fmt: skip


def steps(net: torch.nn.Module, optimizer: Any, images: torch.Tensor) -> None:
    for _ in range(6):
        optimizer.zero_grad()
        net(images).square().mean().backward()
        optimizer.step()


def body_train(images: torch.Tensor) -> list[float]:
    net = model()
    net(torch.zeros(2, 1, 8, 8))  # makes the lazy layer
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net.named_parameters()
    )
    steps(net, optimizer, images.chunk(hvd.size())[hvd.rank()])
    return [p.double().sum().item() for p in net.state_dict().values()]


def test_training_is_that_of_one_process(ranks: RankFactory) -> None:
    images = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(1)) + 2
    alone = ranks(1).run(body_train, images)[0]
    for size in (2, 3):
        for result in ranks(size).run(body_train, images):
            assert result == pytest.approx(alone, rel=1e-4, abs=1e-4)


def body_join() -> list[float]:
    norm = hvd.SyncBatchNorm(1)
    for turn in range(1 + 2 * hvd.rank()):
        norm(torch.full((2, 1), float(turn)) + torch.tensor([[0.0], [1.0]])).sum().backward()
    hvd.join()
    return list(norm.running_mean.tolist())


def test_a_rank_that_has_joined_has_no_rows(two_ranks: RankPool) -> None:
    means = two_ranks.run(body_join)
    assert means[0] == pytest.approx([0.05])
    assert means[1] == pytest.approx([(0.05 * 0.9 + 0.15) * 0.9 + 0.25])


@pytest.mark.parametrize(("kind", "said"), [
    ("torch's", 1), ("torch's, for another optimizer", 0), ("torch's, frozen", 0), ("hvd's", 0),
])  # fmt: skip
@on_ranks(2)
def test_torchs_class_without_a_default_group_warns_once(kind: str, said: int) -> None:
    other = torch.nn.SyncBatchNorm(2)  # trained by nobody
    norm = hvd.SyncBatchNorm(2) if kind == "hvd's" else torch.nn.SyncBatchNorm(2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), norm)
    if kind == "torch's, frozen":
        norm.eval()
    if kind == "torch's, for another optimizer":
        model[1] = torch.nn.Identity()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    with logged() as messages:
        for _ in range(2):
            model(torch.rand(4, 2)).sum().backward()
            optimizer.step()
    warnings = [text for text in messages if "SyncBatchNorm" in text]
    assert len(warnings) == (said if hvd.rank() == 0 else 0), other
    if warnings:
        assert "each rank's batch alone, of '1.weight': torch.distributed has no" in warnings[0]
