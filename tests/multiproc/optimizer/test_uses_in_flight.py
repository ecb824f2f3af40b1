"""What programs do with gradients in flight, with their norms and factors, beside plain PyTorch.

All ranks train on the same rows, so each compares its weights, and what the program has seen, with
those of the plain program.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.jobs import SMALL, new_job
from helpers.on_ranks import on_ranks
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

import hvd_order.torch as hvd

STEPS = 5  # from the third on all-reduces are split
SPLIT = {"HVD_ORDER_DEBUG": "split", "HVD_ORDER_TUNE": "0", **SMALL}
WHOLE = {"HVD_ORDER_SPLIT": "never", "HVD_ORDER_TUNE": "0", **SMALL}
See = Callable[[Tensor], None]
Uses = dict[str, Callable[[nn.Module, int, See], None]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 31), nn.Tanh(), nn.Linear(31, 3))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def train(use: Callable[[nn.Module, int, See], None], distributed: bool) -> list[Tensor]:
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    seen: list[Tensor] = []
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(step)
        x, y = torch.randn(12, 37, generator=numbers), torch.randn(12, 3, generator=numbers)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        use(model, step, lambda value: seen.append(value.detach().clone()))
        optimizer.step()
    return [*(p.detach().clone() for p in model.parameters()), *seen]


@pytest.mark.parametrize(
    ("names", "env"),
    [
        pytest.param(names, env, id=f"{names.lower()}-{'split' if env is SPLIT else 'whole'}")
        for names, env in (
            ("FACTORS", SPLIT), ("FACTORS", WHOLE), ("NORMS", SPLIT), ("ALIASES", SPLIT),
            ("ALIASES", WHOLE),
        )
    ],
)  # fmt: skip
@on_ranks(2)
def test_equals_plain_pytorch(names: str, env: dict[str, str]) -> None:
    """How each use differs; and whether the ranks do."""
    uses: Uses = globals()[names]
    differ = {}
    with new_job(env):
        for name, use in uses.items():
            plain = train(use, distributed=False)
            try:
                ours = train(use, distributed=True)
                torch.testing.assert_close(ours, plain, equal_nan=True)
            except Exception as error:
                differ[name] = f"{type(error).__name__}: {error}"
                hvd.shutdown()  # whatever is on its way
                hvd.init()
                continue
            all_ranks = hvd.allgather(torch.cat([each.flatten().double() for each in ours])[None])
            if not torch.equal(all_ranks[0].nan_to_num(), all_ranks[1].nan_to_num()):
                differ[name] = "the ranks differ"
    assert differ == {}


# ---- factors ------------------------------------------------------------------------------------


def by_sign_of_zero(model: nn.Module, step: int, see: See) -> None:
    factor = torch.tensor(0.0)
    torch.nn.utils.get_total_norm(gradients(model))
    for gradient in gradients(model):
        gradient.mul_(factor)
        factor.data.neg_()
    for gradient in gradients(model):
        see(gradient.signbit())


def by_data_after_norms(model: nn.Module, step: int, see: See) -> None:
    """The short way of clip_grad_norm_."""
    norms = [torch.linalg.vector_norm(gradient, 2.0) for gradient in gradients(model)]
    factor = 0.1 / torch.stack(norms).max()
    kept = factor.data
    for gradient in gradients(model):
        gradient.mul_(factor)
        kept.mul_(0.9)


def by_another_gradient(model: nn.Module, step: int, see: See) -> None:
    weight, bias = gradients(model)[:2]
    bias.mul_(weight.sum())
    weight.mul_(bias.detach()[0])


def by_infinity(model: nn.Module, step: int, see: See) -> None:
    """Elements that are 0 become NaN."""
    weight = gradients(model)[0]
    weight.mul_(0.0).mul_(math.inf)
    see(weight.norm())
    weight.zero_()


FACTORS: Uses = {
    "sign of zero": by_sign_of_zero,
    "data after norms": by_data_after_norms,
    "another gradient": by_another_gradient,
    "infinity": by_infinity,
}


# ---- norms --------------------------------------------------------------------------------------


def clip(model: nn.Module, see: See) -> None:
    see(nn.utils.clip_grad_norm_(model.parameters(), 0.05))


def norms_of_a_list(model: nn.Module, step: int, see: See) -> None:
    norms = torch._foreach_norm(gradients(model))
    norms[0].untyped_storage().fill_(0)
    see(torch.stack(list(norms)))
    norms[1].resize_(3).fill_(5.0)
    see(torch.stack(list(torch._foreach_norm(gradients(model)))))
    clip(model, see)


def norms_in_a_graph(model: nn.Module, step: int, see: See) -> None:
    """Autograd keeps one norm; another may change."""
    first, second = (torch.linalg.vector_norm(gradient) for gradient in gradients(model)[:2])
    weight = torch.ones((), requires_grad=True)
    product = weight * first
    second.mul_(0.0)
    (found,) = torch.autograd.grad(product, weight)
    see(found)
    clip(model, see)


def arguments(model: nn.Module, step: int, see: See) -> None:
    weight = gradients(model)[0]
    place = torch.zeros(())
    see(weight.norm(2, dim=0))
    see(torch.linalg.vector_norm(weight, 2, 0))
    see(weight.norm(2, None, False))
    see(torch.linalg.vector_norm(weight, 2, None, True))
    torch.linalg.vector_norm(weight, out=place)
    see(place)
    see(torch.norm(weight, "fro", None, False, None, torch.float64))
    see(torch.linalg.norm(weight, 2))
    see(torch.linalg.norm(weight, None, 1))
    clip(model, see)


def with_a_graph(model: nn.Module, step: int, see: See) -> None:
    weight = gradients(model)[0].detach().requires_grad_()
    (found,) = torch.autograd.grad(weight.norm(), weight)
    see(found)


def huge(model: nn.Module, step: int, see: See) -> None:
    """Sums of squares that float32 does not hold, in which torch adds them up."""
    torch._foreach_mul_(gradients(model), 1e21)
    see(torch.stack([gradient.norm() for gradient in gradients(model)]))
    clip(model, see)


def edited_by_dlpack(model: nn.Module, step: int, see: See) -> None:
    """In C++, which does not call a guard: the gradient must be complete."""
    see(gradients(model)[0].abs().sum())
    from_dlpack(torch._C._to_dlpack(gradients(model)[0])).mul_(3.0)
    see(torch.stack(list(torch._foreach_norm(gradients(model), 2.0))))
    see(torch.stack(list(torch._foreach_norm(gradients(model), math.inf))))
    clip(model, see)


def edited_through_a_view(model: nn.Module, step: int, see: See) -> None:
    flat = gradients(model)[0].view(-1)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    flat.data[3:].mul_(0.001)
    see(gradients(model)[0].norm())
    gradients(model)[0].mul_(2.0)
    see(gradients(model)[0].norm())
    clip(model, see)


def edited_and_not_finite(model: nn.Module, step: int, see: See) -> None:
    array = gradients(model)[0].numpy()
    array[0, 0] = math.inf
    see(gradients(model)[0].norm())
    array[0, 0] = 0.0
    clip(model, see)


NORMS: Uses = {
    "of a list": norms_of_a_list,
    "in a graph": norms_in_a_graph,
    "arguments": arguments,
    "with a graph": with_a_graph,
    "huge": huge,
    "edited by dlpack": edited_by_dlpack,
    "edited through a view": edited_through_a_view,
    "edited and not finite": edited_and_not_finite,
}


# ---- detach() and .data -------------------------------------------------------------------------


def other_memory(model: nn.Module, step: int, see: See) -> None:
    weight, bias = gradients(model)[:2]
    alias = weight.detach()
    alias.set_(torch.ones(5))
    see(alias.norm())
    alias.mul_(3.0)
    see(alias)
    other = bias.data
    other.resize_(3)
    see(other.norm())
    see(bias.norm())
    third = weight.data
    third.data = torch.full((2,), 2.0)
    see(third.norm())
    clip(model, see)


def scaled(model: nn.Module, step: int, see: See) -> None:
    weight, bias = gradients(model)[:2]
    alias = weight.detach()
    see(alias.norm())
    assert alias.mul_(0.5) is alias
    weight.data *= 0.5
    weight.detach().data.div_(torch.tensor(3.0)).clamp_(-0.1, 0.1)
    alias += 1.0
    see(alias)
    see(weight)
    bias.data = bias.data
    torch._foreach_mul_([bias.detach(), bias.data], 2.0)
    see(torch.stack([alias.cpu().sum(), bias.data.sum()]))
    see(copy.deepcopy(bias.detach()))


def changed_with_a_graph(model: nn.Module, step: int, see: See) -> None:
    alias = gradients(model)[0].detach().requires_grad_()
    try:
        alias.mul_(2.0)
    except RuntimeError:  # a leaf that requires a gradient
        see(torch.ones(()))


ALIASES: Uses = {
    "other memory": other_memory,
    "scaled": scaled,
    "changed with a graph": changed_with_a_graph,
}


@on_ranks(2)
def test_an_alias_outlives_its_step() -> None:
    """An alias that outlives the step: an ordinary tensor, and apart from the optimizer's life."""
    found = []
    with new_job(SPLIT):
        model = network()
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(2, 37)).sum().backward()
            alias = gradients(model)[0].detach()
            in_flight = type(alias) is not Tensor
            optimizer.step()
            sums = gradients(model)[0].clone()
            found.append((in_flight, torch.equal(alias, sums), type(alias) is Tensor))
        del optimizer
        assert alias.sum().isfinite()
    assert found == [(True, True, True)] * STEPS


# ---- unscaling ----------------------------------------------------------------------------------

# dtype, gradients, factor before, scale: what is finite, and what is not.
SCALED = {
    "float16, a norm above its range": ("float16", [1000.0] * 10000, 1.0, 2.0),
    "float16, twice its range and back": ("float16", [40000.0, 1.0], 2.0, 4.0),
    "float16, a small factor": ("float16", [60000.0] * 9, 1.0, 2.0**30),
    "float16, infinite": ("float16", [1.0, math.inf], 1.0, 2.0),
    "bfloat16, large": ("bfloat16", [3e38] * 3, 1.0, 2.0**100),
    "float32, a norm above its range": ("float32", [2.0**125] * 10000, 1.0, 2.0**125),
    "float32, above its range": ("float32", [2e38, 1.0], 2.0, 2.0),
    "float32, changed and finite": ("float32", [2e37, 1.0], 2.0, 2.0),
    "float32, NaN": ("float32", [1.0, math.nan], 1.0, 2.0),
    "float64, squares above its range": ("float64", [1e200] * 3, 1.0, 2.0),
    "float64, changed": ("float64", [1e200] * 3, 1e-3, 2.0),
    "float64, infinite": ("float64", [1e200, -math.inf], 1.0, 2.0),
}


def unscale(case: str, distributed: bool) -> list[Tensor]:
    dtype, values, before, scale = SCALED[case]
    wanted = torch.tensor(values, dtype=getattr(torch, dtype))
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones_like(wanted))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    if distributed:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), op=hvd.Sum
        )
    mine = wanted / hvd.size() if distributed else wanted  # a sum of it is in the type's range
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.weight.backward(mine)
        gradient = model.weight.grad
        assert gradient is not None
        if before != 1.0:
            gradient.mul_(before)
        found_inf = torch.zeros(1)
        inverse = torch.tensor(1.0 / scale)
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, inverse)
        inverse.data.fill_(7.0)
        seen += [found_inf, gradient.norm().clone(), gradient.clone()]
        optimizer.step()
    return seen


@on_ranks(2)
def test_unscaling_finds_what_is_not_finite() -> None:
    differ = {}
    with new_job(SPLIT):
        for case in SCALED:
            try:
                torch.testing.assert_close(
                    unscale(case, True), unscale(case, False), equal_nan=True
                )
            except AssertionError as error:
                differ[case] = str(error)
    assert differ == {}
