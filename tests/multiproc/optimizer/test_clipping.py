"""Clipping by the optimizer's own method, beside torch's function."""

from __future__ import annotations

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.ranks import RankPool

import hvd_order.torch as hvd


def body_train(name: str, ours: bool, touch: bool) -> tuple[list[float], torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.ReLU(), torch.nn.Linear(80, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, name),
    )
    norms = []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step + 10 * hvd.rank()))
        (3 * model(x)).square().sum().backward()
        if touch:
            optimizer.synchronize()
            model[0].weight.grad.mul_(7.0)
            model[2].bias.grad = torch.full((1,), 5.0)
        if ours:
            norm = optimizer.clip_grad_norm_(1.5)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.5)
        norms.append(norm.item())
        optimizer.step()
    return norms, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("touch", [False, True], ids=["untouched", "touched"])
@pytest.mark.parametrize("name", ["none", "bf16", "fp16_ef"])
def test_equals_torch(two_ranks: RankPool, name: str, touch: bool) -> None:
    wanted, weights = two_ranks.run(body_train, name, False, touch)[0]
    results = two_ranks.run(body_train, name, True, touch)
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(torch.tensor(results[0][0]), torch.tensor(wanted))
    torch.testing.assert_close(results[0][1], weights)
    assert max(wanted) > 1.5  # it has clipped


def body_scaler() -> tuple[float, float]:
    """GradScaler divides in place after the squares were added up."""
    model = torch.nn.Linear(64, 8)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.bf16,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(64)).sum()).backward()
        scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(1000.0)
        wanted = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
    return norm.item(), wanted.item()


def test_after_unscaling(two_ranks: RankPool) -> None:
    norm, wanted = two_ranks.run(body_scaler)[0]
    assert norm == pytest.approx(wanted, rel=1e-6)


@on_ranks(2)
def test_the_norm_has_the_type_that_torch_gives_it() -> None:
    """Gradients of two types, some of them with known squares, others too large for float32's."""
    small = torch.nn.Parameter(torch.ones(100))
    large = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([small, large], lr=0.1), compression=hvd.Compression.bf16
    )
    small.backward(torch.full((100,), 1e10))
    large.backward(torch.full((3,), 1e30, dtype=torch.float64))
    norm = optimizer.clip_grad_norm_(1.0)
    wanted = torch.nn.utils.get_total_norm(
        [torch.full((100,), 1e10), torch.full((3,), 1e30, dtype=torch.float64).bfloat16().double()]
    )
    assert wanted.dtype == torch.float64
    torch.testing.assert_close(norm, wanted)


def test_on_one_rank() -> None:
    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(4)).sum().backward()
    assert optimizer.clip_grad_norm_(0.5).item() == pytest.approx(5**0.5)  # type: ignore[operator]
    assert model.weight.grad is not None
    assert model.weight.grad.norm() < 0.5
    hvd.shutdown()
