"""Parameters without elements yet, of changing shape, with gradients of another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.on_ranks import on_ranks
from torch import Tensor, nn

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage

ROWS = 12
HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")

Loop = Callable[[Callable[..., Any], Callable[[Tensor], Tensor]], nn.Module]


def rows(step: int) -> Tensor:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 6, generator=numbers, dtype=torch.float64)


def layers(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def both(loop: Loop, **how: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The weights after training on all ranks, and in one process."""

    def distributed(optimizer: Any, model: nn.Module) -> Any:
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **how)

    got = loop(distributed, lambda x: x.chunk(hvd.size())[hvd.rank()])
    expected = loop(lambda optimizer, model: optimizer, lambda x: x)
    return [[p.detach().clone() for p in model.parameters()] for model in (got, expected)]  # type: ignore[return-value]


# ---- another shape ----------------------------------------------------------------------------


def grow(wrap: Callable[..., Any], mine: Callable[[Tensor], Tensor]) -> nn.Module:
    model = layers()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    first, last = model[0], model[2]
    for step in range(9):
        optimizer.zero_grad()
        if step == 5:
            more = torch.ones(3, 8, dtype=torch.float64)
            first.weight.data = torch.cat([first.weight.data, more[:2, :6]])
            first.bias.data = torch.cat([first.bias.data, more[0, :2]])
            last.weight.data = torch.cat([last.weight.data, more[:, :2]], 1)
        model(mine(rows(step))).pow(2).mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", ["plain", "feedback", "sharded"])
@on_ranks(2)
def test_parameters_of_another_shape(kind: str) -> None:
    if kind == "plain":
        got, expected = both(grow)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    elif kind == "feedback":  # what a cast has lost has the old shape
        both(grow, compression=hvd.Compression.bf16_ef)
    else:
        with pytest.raises(InvalidUsage, match=r"had the shape \(8, 6\) and has \(10, 6\) now"):
            both(grow, sharded=True)


@on_ranks(2)
def test_a_parameter_resized_within_a_step_is_refused() -> None:
    model = layers()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        backward_passes_per_step=2,
    )
    model(rows(0)).sum().backward()
    model.zero_grad()
    last = model[2]
    last.weight.data = torch.ones(4, 8, dtype=torch.float64)
    last.bias.data = torch.ones(4, dtype=torch.float64)
    with pytest.raises(InvalidUsage, match=r"shape \(4,\).* in the middle of a step"):
        model(rows(1)).sum().backward()
    del optimizer


# ---- gradients of another dtype ---------------------------------------------------------------


class Wide(torch.optim.Optimizer):
    """SGD in the dtype of the gradients."""

    hvd_order_separable = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    assert p.grad.dtype == torch.float32
                    p.copy_(p.float() - group["lr"] * p.grad)


def wide(wrap: Callable[..., Any], mine: Callable[[Tensor], Tensor], late: bool) -> nn.Module:
    model: Any = layers(torch.bfloat16)

    def widen() -> None:
        for p in model.parameters():
            p.grad_dtype = torch.float32

    if not late:
        widen()
    optimizer = wrap(Wide(model.parameters()), model)
    if late:
        widen()
    for step in range(7):
        optimizer.zero_grad()
        model(mine(rows(step).bfloat16())).float().pow(2).mean().backward()
        optimizer.step()
    return model


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="Tensor.grad_dtype came with PyTorch 2.10")
@on_ranks(2)
def test_gradients_of_another_dtype() -> None:
    for late in (False, True):
        got, expected = both(lambda wrap, mine, late=late: wide(wrap, mine, late))
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)
    both(lambda wrap, mine: wide(wrap, mine, False), compression=hvd.Compression.fp16)
    model: Any = layers(torch.bfloat16)
    for p in model.parameters():
        p.grad_dtype = torch.float32
    with pytest.raises(InvalidUsage, match=r"gradient of torch\.float32"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sharded=True)


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="Tensor.grad_dtype came with PyTorch 2.10")
@on_ranks(2)
def test_a_gradient_of_a_dtype_that_nobody_could_foresee_is_refused() -> None:
    weight: Any = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad_dtype = None
    sgd = torch.optim.SGD([weight], lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, [("weight", weight)])
    (weight * torch.ones(4, dtype=torch.bfloat16)).sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    optimizer.step()
    optimizer.zero_grad()

    class Widening(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.float()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    with pytest.raises(InvalidUsage, match=r"grad_dtype = torch\.float32 on every rank"):
        Widening.apply(weight).sum().backward()
    del optimizer


# ---- no elements ------------------------------------------------------------------------------


@on_ranks(2)
def test_parameters_without_elements_are_refused() -> None:
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    lazy, freed = nn.LazyLinear(2), nn.Linear(2, 2)
    freed.weight.untyped_storage().resize_(0)
    cures = ((meta, "to_empty"), (lazy, "call the model once"), (freed, "give it elements"))
    for module, cure in cures:
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        with pytest.raises(InvalidUsage, match=cure) as refused:
            hvd.DistributedOptimizer(sgd, module.named_parameters())
        assert f"rank {hvd.rank()}: parameter 'weight'" in str(refused.value)
    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidUsage, match="to_empty"):
        optimizer.add_param_group({"params": meta.parameters()})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": iter(nn.Linear(2, 2).parameters())})
    assert len(optimizer.param_groups[1]["params"]) == 2


@pytest.mark.parametrize("narrow", [False, True])
@on_ranks(2)
def test_sharded_state_has_parameters_without_elements(narrow: bool) -> None:
    dtype = torch.bfloat16 if narrow else torch.float32
    model: Any = nn.ParameterDict({
        "some": nn.Parameter(torch.ones(5, dtype=dtype)),
        "none": nn.Parameter(torch.ones(0, 3, dtype=dtype)),
    })  # fmt: skip

    def train(optimizer: Any) -> None:
        (model["some"].sum() + model["none"].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), model.named_parameters(), sharded=True
    )
    for _ in range(4):
        train(optimizer)
    state = optimizer.state_dict()
    assert sorted(state["state"]) == [0, 1]
    empty = next(s for s in state["state"].values() if s["exp_avg"].numel() == 0)
    assert empty["exp_avg"].shape == (0, 3)
    assert empty["step"] == 4
    optimizer.load_state_dict(state)
    train(optimizer)
    assert all(each["step"] == 5 for each in optimizer.state_dict()["state"].values())
