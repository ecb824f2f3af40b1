"""Adasum against the formula of the paper, computed by one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory, RankPool

import hvd_order.torch as hvd


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Maleki et al., section 3, in float64."""
    dot, a2, b2 = (a * b).sum(), (a * a).sum(), (b * b).sum()
    of_a = 1 - dot / (2 * a2) if a2 > 0 else torch.tensor(1.0)
    of_b = 1 - dot / (2 * b2) if b2 > 0 else torch.tensor(1.0)
    return of_a * a + of_b * b


def adasum(vectors: list[torch.Tensor]) -> torch.Tensor:
    wide = [v.double() for v in vectors]
    while len(wide) > 1:
        wide = [pair(a, b) for a, b in zip(wide[::2], wide[1::2], strict=True)]
    return wide[0]


def tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    common = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (common + 0.7 * torch.randn(shape, generator=generator)).to(dtype)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks()
def test_every_form_is_that_of_the_paper() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype, tolerance in TOLERANCE.items():
        for shape in [(), (1,), (7,), (3, 5), (0,), (1000,)]:
            everyone = [tensor(r, shape, dtype) for r in range(size)]
            wanted = adasum(everyone).to(dtype)
            mine = everyone[rank].clone()
            got = hvd.allreduce(mine, op=hvd.Adasum)
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
            assert torch.equal(mine, everyone[rank])
            assert hvd.allreduce_(mine, op=hvd.Adasum) is mine
            assert torch.equal(mine, got)
            handle = hvd.allreduce_async(everyone[rank], op=hvd.Adasum, postscale_factor=2.0)
            torch.testing.assert_close(
                hvd.synchronize(handle), 2 * wanted, rtol=tolerance, atol=2 * tolerance
            )
    shapes = [(3,), (0,), (40, 2), (1,)]
    lists = [[tensor(r, s, torch.float32, i) for i, s in enumerate(shapes)] for r in range(size)]
    lists = [[*one, one[0].double()] for one in lists]
    for got, *of_ranks in zip(
        hvd.grouped_allreduce(lists[rank], op=hvd.Adasum), *lists, strict=True
    ):
        torch.testing.assert_close(got.double(), adasum(of_ranks), rtol=1e-5, atol=1e-5)
    gathered = hvd.allgather(hvd.allreduce(tensor(rank, (9,), torch.float32), op=hvd.Adasum)[None])
    assert torch.equal(gathered, gathered[:1].expand_as(gathered)), "the same bits everywhere"


def body_special() -> list[list[float]]:
    rank = hvd.rank()
    x = torch.tensor([3.0, 4.0])
    results = [
        hvd.allreduce(x, op=hvd.Adasum),
        hvd.allreduce(x if rank == 0 else torch.tensor([-4.0, 3.0]), op=hvd.Adasum),
        hvd.allreduce(x * rank, op=hvd.Adasum),
        hvd.allreduce(x * 1e-18, op=hvd.Adasum) * 1e18,
    ]
    with pytest.raises(ValueError, match=r"Adasum is not defined for torch\.int64"):
        hvd.allreduce(torch.tensor([1]), op=hvd.Adasum)
    if rank == 0:
        hvd.join()
    else:
        results.append(hvd.allreduce(x, op=hvd.Adasum))
        hvd.join()
    return [one.tolist() for one in results]


def test_parallel_orthogonal_zero_and_tiny(two_ranks: RankPool) -> None:
    parallel, orthogonal, zero, tiny, joined = two_ranks.run(body_special)[1]
    assert parallel == pytest.approx([3.0, 4.0]), "the mean"
    assert orthogonal == pytest.approx([-1.0, 7.0]), "the sum"
    assert zero == pytest.approx([3.0, 4.0])
    assert tiny == pytest.approx([3.0, 4.0])
    assert joined == pytest.approx([3.0, 4.0])


@on_ranks(3)
def test_other_numbers_of_ranks_are_refused_as_in_horovod() -> None:
    text = "Running Adasum with non-power of 2 ranks is not supported yet"
    x = torch.nn.Parameter(torch.ones(2))
    for call in (
        lambda: hvd.allreduce(x.detach(), op=hvd.Adasum),
        lambda: hvd.grouped_allreduce([x.detach()], op=hvd.Adasum),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), op=hvd.Adasum),
    ):
        with pytest.raises(NotImplementedError, match=text):
            call()


# ---- the optimizer ----


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def data(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(50 + rank)
    return [torch.randn(3, 4) for _ in range(8)]


def optimizer_of(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def body_train(added: bool) -> list[list[float]]:
    net: Any = network()
    first = net[:1] if added else net
    inner = optimizer_of(first)
    torch.optim.lr_scheduler.ConstantLR(inner, factor=1.0)  # wraps step() of what is wrapped below
    optimizer: Any = hvd.DistributedOptimizer(
        inner, first.named_parameters(), op=hvd.Adasum, backward_passes_per_step=2
    )
    assert isinstance(optimizer, torch.optim.SGD)
    if added:
        optimizer.add_param_group({"params": list(net[1:].parameters())})
    batches = data(hvd.rank())
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        for x in (first, second):
            net(x).square().mean().backward()
        if hvd.size() > 1:
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad()
        optimizer.step()
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="Skipping synchronization"):
            optimizer.skip_synchronize()
    return [p.tolist() for p in net.parameters()]


def trained_alone(size: int) -> list[torch.Tensor]:
    nets = [network() for _ in range(size)]
    optimizers = [optimizer_of(net) for net in nets]
    for turn in range(0, 8, 2):
        before = [p.detach().clone() for p in nets[0].parameters()]
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            for x in data(rank)[turn : turn + 2]:
                net(x).square().mean().backward()
            optimizer.step()
        for start, *of_ranks in zip(before, *(net.parameters() for net in nets), strict=True):
            change = adasum([p.detach() - start for p in of_ranks])
            for p in of_ranks:
                p.data.copy_(start + change)
    return [p.detach() for p in nets[0].parameters()]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_training_joins_the_changes_of_the_ranks(ranks: RankFactory, size: int) -> None:
    wanted = trained_alone(size)
    for added in (False, True):  # the last layer, to a distributed optimizer
        for result in ranks(size).run(body_train, added):
            for got, parameter in zip(result, wanted, strict=True):
                torch.testing.assert_close(torch.tensor(got), parameter, rtol=1e-4, atol=1e-5)
