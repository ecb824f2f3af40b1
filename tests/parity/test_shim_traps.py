"""The optimizer as the user has made it, and gradients that are sparse, compressed or in flight.

Readers that come too early are in tests/random_programs.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from typing import Any

import pytest
import torch
from helpers.jobs import new_job
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory
from torch import Tensor, nn

import hvd_order.torch as hvd

LR = 0.1


def wrapped(model: nn.Module) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), named_parameters=model.named_parameters()
    )


def linear() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(3, 3, bias=False, dtype=torch.float64)


def my_rows() -> Tensor:
    """Row r is rank r's; the average gradient of ``model(x).sum()`` is their mean."""
    return torch.arange(1.0, 4.0, dtype=torch.float64)[None] * (hvd.rank() + 1)


def backward(model: nn.Module) -> None:
    model(my_rows()).sum().backward()


def mean_gradient() -> Tensor:
    mean = (hvd.size() + 1) / 2
    return (torch.arange(1.0, 4.0, dtype=torch.float64) * mean).expand(3, 3)


def check(seen: Tensor, wanted: Tensor, rtol: float = 1e-12) -> None:
    """Raises with both values if they differ."""
    torch.testing.assert_close(seen, wanted, rtol=rtol, atol=0)


@on_ranks(2)
def test_grad_scaler_without_ritual() -> None:
    model = linear()
    start = model.weight.detach().clone()
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(my_rows()).sum()
        if step == 3 and hvd.rank() == 1:
            loss = loss * float("inf")  # on one rank; all must skip
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    check(model.weight.data, start - 4 * LR * mean_gradient())
    assert scaler.get_scale() == 4.0


@on_ranks(2)
def test_the_wrapped_optimizer_is_still_the_users() -> None:
    model = linear()
    inner = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()  # the same on all ranks
    inner.step()  # state from before wrapping, as from a checkpoint
    inner.zero_grad()
    fired: list[str] = []
    inner.register_step_post_hook(lambda *_: fired.append("post"))
    inner.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    for _ in range(3):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    again = pickle.loads(pickle.dumps(optimizer))
    seen = {
        "same object": optimizer is inner,
        "instance": isinstance(optimizer, torch.optim.Adam),
        "state kept": float(optimizer.state_dict()["state"][0]["step"]) == 4,
        "hooks once a step": fired == ["pre", "post"] * 3,
        "amp support": optimizer._step_supports_amp_scaling,
        "pickles as its class": type(again) is torch.optim.Adam,
        "copies as its class": type(copy.deepcopy(optimizer)) is torch.optim.Adam,
    }
    assert all(seen.values()), seen


@on_ranks(2)
def test_sparse_gradients() -> None:
    for optimizer, as_dense in (("SGD", False), ("SparseAdam", False), ("SGD", True)):
        check_sparse(optimizer, as_dense)


def check_sparse(optimizer_class: str, as_dense: bool) -> None:
    results = []
    for distributed in (True, False):
        torch.manual_seed(2)
        table = nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
        make = getattr(torch.optim, optimizer_class)
        optimizer = make(table.parameters(), lr=LR)
        if distributed:
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=table.named_parameters(), sparse_as_dense=as_dense
            )
        everyone = [torch.tensor([r, r + 1, 7]) for r in range(hvd.size())]
        for step in range(5):
            optimizer.zero_grad()
            rows = [everyone[hvd.rank()]] if distributed else everyone
            if step != 3 or not distributed or hvd.rank() == 0:
                use = rows if step != 3 else rows[:1]
                scale = 1 if distributed else 1 / hvd.size()
                sum(table(row).square().sum() * scale for row in use).backward()
            optimizer.step()
        results.append(table.weight.data.clone())
    check(*results, rtol=1e-9)


@on_ranks(2)
def test_compression_rounds_what_travels() -> None:
    """Relative error of four updates by sevenths, which no format has exactly."""
    errors = {}
    for name in ("none", "fp16", "bf16"):
        parameter = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            named_parameters=[("parameter", parameter)],
            compression=getattr(hvd.Compression, name),
        )
        for _ in range(4):
            optimizer.zero_grad()
            (parameter * (hvd.rank() + 1) / 7).sum().backward()
            optimizer.step()
        wanted = -4 * (hvd.size() + 1) / 2 / 7
        errors[name] = float((parameter.data / wanted - 1).abs().max())
    assert errors["none"] < 1e-14
    assert 1e-5 < errors["fp16"] < 2**-10
    assert 1e-4 < errors["bf16"] < 2**-7


@on_ranks(2)
def test_memory_formats_and_dtypes() -> None:
    results = []
    for distributed in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double()
        model[0] = model[0].to(memory_format=torch.channels_last)
        model[2] = model[2].float()  # two dtypes, two gradient buffers
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if distributed:
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters()
            )
        for _ in range(5):
            optimizer.zero_grad()
            x = torch.ones(1, 2, 4, 4, dtype=torch.float64)  # equal rows: no rank is special
            hidden = model[1](model[0](x)).float()
            model[2](hidden).square().sum().backward()
            optimizer.step()
        results.append([p.data.clone() for p in model.parameters()])
    for mine, alone in zip(*results, strict=True):
        check(mine, alone, rtol=1e-6)


@on_ranks(2)
def test_gradients_in_flight_are_protected() -> None:
    errors = {}
    model = linear()
    optimizer = wrapped(model)
    backward(model)
    for name, mistake in {
        "zero_grad": optimizer.zero_grad,
        "second backward": lambda: backward(model),
    }.items():
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            mistake()
        errors[name] = str(caught.value)
    optimizer.step()
    check(model.weight.detach(), linear().weight.detach() - LR * mean_gradient())  # of one pass
    assert "before optimizer.step()" in errors["zero_grad"]
    assert "more than backward_passes_per_step" in errors["second backward"]
    assert "weight" in errors["second backward"]


def body_digest(mode: dict[str, str]) -> str:
    """Of the weights after a training whose slices are ordered in this way."""
    with new_job({"HVD_ORDER_SLICE_BYTES": "1KiB", **mode}):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(5)])
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=1e-2), model.named_parameters()
        )
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(4, 40) + hvd.rank()).square().mean().backward()
            optimizer.step()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


MODES = [
    {"HVD_ORDER_AGREEMENT": "leader"},
    {"HVD_ORDER_AGREEMENT": "negotiated"},
    {"HVD_ORDER_AGREEMENT": "planned"},
    {"HVD_ORDER_POLICY": "arrival"},
    {"HVD_ORDER_CROSS_ITERATION": "0"},
]


def test_results_do_not_depend_on_how_slices_are_ordered(ranks: RankFactory) -> None:
    assert len({digest for mode in MODES for digest in ranks(2).run(body_digest, mode)}) == 1
