"""Parameter servers' arithmetic: the same numbers as torch's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from hvd_order._native._core import UpdateRule, sum_elements
from hvd_order.base.errors import InvalidUsage

STEPS = 50
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
# Every combination of a row's options; the other hyper-parameters differ from all defaults.
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "sgd": {
        "momentum": [0.0, 0.9],
        "dampening": [0.0, 0.3],
        "nesterov": [False, True],
        "weight_decay": [0.0, 0.1],
        "maximize": [False, True],
    },
    "adam": {
        "amsgrad": [False, True],
        "weight_decay": [0.0, 0.1],
        "maximize": [False, True],
        "betas": [(0.8, 0.99), (0.3, 0.9), (0.0, 0.0)],
    },
    "adagrad": {
        "lr_decay": [0.0, 0.1],
        "initial_accumulator_value": [0.0, 0.5],
        "weight_decay": [0.0, 0.1],
        "maximize": [False, True],
    },
    "rmsprop": {
        "momentum": [0.0, 0.9],
        "centered": [False, True],
        "alpha": [0.95, 0.4],
        "weight_decay": [0.0, 0.1],
        "maximize": [False, True],
    },
}
OPTIONS["adamw"] = OPTIONS["adam"]
# What torch keeps in the moments, in their order.
STATE = {
    "sgd": ["momentum_buffer"],
    "adam": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "adamw": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "adagrad": ["sum"],
    "rmsprop": ["square_avg", "grad_avg", "momentum_buffer"],
}
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def rule_of(kind: str, hyper: dict[str, Any]) -> UpdateRule:
    ours = dict(hyper)
    if "betas" in ours:
        ours["beta1"], ours["beta2"] = ours.pop("betas")
    return UpdateRule(kind, **ours)


def combinations() -> Iterator[Any]:
    for kind, options in OPTIONS.items():
        for values in product(*options.values()):
            hyper = dict(zip(options, values, strict=True))
            if hyper.get("nesterov") and (hyper["momentum"] == 0 or hyper["dampening"] != 0):
                continue
            if hyper.get("centered") and hyper["alpha"] < 0.5:
                continue  # a variance of so few gradients is mostly rounding errors, torch's too
            named = "-".join(f"{name}={value}" for name, value in hyper.items() if value)
            yield pytest.param(kind, hyper | {"lr": 0.02}, id=f"{kind}-{named}")


@pytest.mark.parametrize(("kind", "hyper"), list(combinations()))
def test_fifty_steps_are_those_of_torch(kind: str, hyper: dict[str, Any]) -> None:
    if kind != "sgd":
        hyper = hyper | {"eps": 1e-3}
    random = torch.Generator().manual_seed(1)
    theirs = [torch.randn(count, generator=random) for count in (1, 7, 1023)]
    ours = [tensor.numpy().copy() for tensor in theirs]
    exact = [tensor.double() for tensor in theirs]
    optimizer = OPTIMIZERS[kind](theirs, foreach=False, **hyper)
    in_double = OPTIMIZERS[kind](exact, foreach=False, **hyper)
    rule = rule_of(kind, hyper)
    moments = [[np.full_like(value, np.nan) for _ in range(rule.moments)] for value in ours]
    for state in moments:
        rule.initialise_moments(state)
    for step in range(1, STEPS + 1):
        for value, state, tensor, double in zip(ours, moments, theirs, exact, strict=True):
            tensor.grad = torch.randn(tensor.shape, generator=random)
            double.grad = tensor.grad.double()
            rule.apply(step, tensor.grad.numpy(), value, state)
        optimizer.step()
        in_double.step()
    for value, state, tensor, double in zip(ours, moments, theirs, exact, strict=True):
        expected = [tensor, *state_of(optimizer, tensor, kind)]
        right = [double, *state_of(in_double, double, kind)]
        for our, their, best in zip([value, *state], expected, right, strict=True):
            check_rounding(our, their, best)


def state_of(optimizer: torch.optim.Optimizer, tensor: torch.Tensor, kind: str) -> list[Any]:
    kept = [optimizer.state[tensor].get(name) for name in STATE[kind]]
    return [each for each in kept if each is not None]


def check_rounding(ours: np.ndarray, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """We are no further from what doubles give than torch is, but for a few last bits.

    How torch rounds depends on the processor's instructions.
    """
    our_error = (torch.from_numpy(ours) - exact).abs().max()
    their_error = (theirs - exact).abs().max()
    last_bit = torch.finfo(torch.float32).eps * exact.abs().max().clamp(min=1.0)
    assert our_error <= 2 * their_error + 4 * last_bit


def test_not_a_number_stays_in_the_maximum() -> None:
    rule = UpdateRule("adam", amsgrad=True)
    value = np.ones(9, np.float32)
    moments = [np.zeros(9, np.float32) for _ in range(3)]
    gradient = np.ones(9, np.float32)
    gradient[4] = np.nan
    rule.apply(1, gradient, value, moments)
    moments[1][:] = 0.0
    rule.apply(2, np.ones(9, np.float32), value, moments)
    assert np.isnan(moments[2]).tolist() == [i == 4 for i in range(9)]


@pytest.mark.parametrize(
    ("kind", "hyper", "message"),
    [
        ("lion", {}, "no 'lion'"),
        ("sgd", {"lr": -1.0}, "lr of an optimizer is -1; it must be at least 0"),
        ("sgd", {"lr": float("nan")}, "lr of an optimizer is nan"),
        ("sgd", {"momentum": -0.1}, "momentum"),
        ("sgd", {"weight_decay": -0.1}, "weight_decay"),
        ("sgd", {"nesterov": True}, "Nesterov"),
        ("sgd", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "Nesterov"),
        ("adam", {"beta1": 1.0}, r"beta1 of an optimizer is 1; it must be in \[0, 1\)"),
        ("adam", {"beta2": -0.1}, "beta2"),
        ("adamw", {"eps": -1e-8}, "eps"),
        ("adamw", {"weight_decay": -0.1}, "weight_decay"),
        ("adagrad", {"lr_decay": -0.1}, "lr_decay"),
        ("adagrad", {"initial_accumulator_value": -1.0}, "initial_accumulator_value"),
        ("adagrad", {"eps": -1.0}, "eps"),
        ("rmsprop", {"alpha": -0.5}, "alpha"),
        ("rmsprop", {"momentum": -0.5}, "momentum"),
        ("rmsprop", {"eps": -1.0}, "eps"),
    ],
)
def test_what_torch_refuses_is_refused(kind: str, hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        UpdateRule(kind, **hyper)
    theirs = dict(hyper)
    if "beta1" in theirs or "beta2" in theirs:
        theirs["betas"] = (theirs.pop("beta1", 0.9), theirs.pop("beta2", 0.999))
    if kind in OPTIMIZERS and not np.isnan(theirs.get("lr", 0.0)):  # torch lets that one pass
        with pytest.raises(ValueError):  # noqa: PT011 - its words are its own
            OPTIMIZERS[kind]([torch.zeros(1)], **theirs)


def test_buffers_must_be_contiguous_and_of_float32() -> None:
    rule = UpdateRule("sgd")
    good = np.zeros(4, np.float32)
    with pytest.raises(InvalidUsage, match="float32"):
        rule.apply(1, np.zeros(4), good, [])
    with pytest.raises(InvalidUsage, match="contiguous"):
        rule.apply(1, np.zeros(8, np.float32)[::2], good, [])
    with pytest.raises(InvalidUsage, match="4 numbers has a gradient of 3"):
        rule.apply(1, good[:3], good, [])


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def added_up(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One after the other, rounded at the end."""
    wide = [t.float() if t.element_size() == 2 else t for t in tensors]
    total = wide[0]
    for tensor in wide[1:]:
        total = total + tensor
    return total.to(tensors[0].dtype)


def check_sum(dtype: str, tensors: list[torch.Tensor]) -> None:
    out = torch.empty_like(tensors[0])
    sum_elements(dtype, [bytes_of(t) for t in tensors], bytes_of(out))
    expected = added_up(tensors)
    nan = expected.isnan()
    assert torch.equal(out.isnan(), nan)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]
    assert torch.equal(out.view(bits)[~nan], expected.view(bits)[~nan])  # zeros by their sign, too


@pytest.mark.parametrize("inputs", range(1, 10))
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_bitwise_those_of_torch(dtype: str, inputs: int) -> None:
    random = torch.Generator().manual_seed(inputs)
    for count in (1, 7, 1023, 5000):
        wide = torch.randn(inputs, count, generator=random, dtype=torch.float64)
        check_sum(dtype, [row.to(DTYPES[dtype]) for row in wide])


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_add_up_as_in_torch(dtype: str) -> None:
    info = torch.finfo(DTYPES[dtype])
    subnormal = info.smallest_normal * info.eps
    special = [0.0, 1.0, info.max, info.smallest_normal, 1.5 * info.smallest_normal, subnormal]
    special += [3 * subnormal, info.eps, 1 + info.eps, info.max * info.eps / 2, float("inf")]
    values = torch.tensor([*special, *(-x for x in special), float("nan")], dtype=torch.float64)
    values = values.to(DTYPES[dtype])
    first, second, third = torch.meshgrid(values, values, values, indexing="ij")
    check_sum(dtype, [first.flatten(), second.flatten(), third.flatten()])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_number_comes_back(dtype: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    check_sum(dtype, [every])
    for seed in range(8):  # ... and sums of any two round as torch does
        random = torch.Generator().manual_seed(seed)
        check_sum(dtype, [every, every[torch.randperm(2**16, generator=random)]])


def test_sums_of_other_things_are_refused() -> None:
    out = np.zeros(8, np.uint8)
    with pytest.raises(InvalidUsage, match="no 'int32'"):
        sum_elements("int32", [out], out)
    with pytest.raises(InvalidUsage, match="sum of nothing"):
        sum_elements("float32", [], out)
    with pytest.raises(InvalidUsage, match="input of 4 bytes for a sum of 8"):
        sum_elements("float32", [out, out[:4]], out)
    with pytest.raises(InvalidUsage, match="6 bytes are no whole number"):
        sum_elements("float32", [out[:6]], out[:6])
