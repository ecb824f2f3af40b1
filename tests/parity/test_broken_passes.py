"""Backward passes that end by an exception: the program skips the batch, or goes on with a part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers.jobs import new_job
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory
from parity.test_kept_gradients import DEFERS, backward, distributed, model, plain, sgd
from torch import Tensor, nn

import hvd_order.torch as hvd
from hvd_order.base.errors import HorovodInternalError, InvalidUsage

STEPS = 12


class OutOfMemoryError(RuntimeError):
    pass


def fails_in(m: nn.Module, layer: int) -> Callable[[bool], None]:
    """Makes the backward pass of a layer fail; layer 0: after all gradients have come."""
    to_come = [0]  # calls of the hook, with the one that fails

    def hook(_: Tensor) -> None:
        to_come[0] -= 1
        if to_come[0] == 0:
            raise OutOfMemoryError

    if layer == 0:
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(hook)
    else:
        m[layer].weight.register_hook(hook)
    calls = len(list(m.parameters())) if layer == 0 else 1
    return lambda fails: to_come.__setitem__(0, calls if fails else 0)


def none(m: nn.Module, _: torch.optim.Optimizer) -> None:
    for p in m.parameters():
        p.grad = None


SKIPS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer.zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "model.zero_grad": lambda m, _: m.zero_grad(),
    "grad = None": none,
}


def train(wrap: Callable[..., object], layer: int, skip: str | None) -> list[Tensor]:
    m = model()
    optimizer = wrap(sgd(m), m)
    set_fails = fails_in(m, layer)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        set_fails(step in (1, 6, 9))
        try:
            backward(m, step)
        except OutOfMemoryError:
            if skip is not None:
                SKIPS[skip](m, optimizer)
                continue
            seen.append(m[2].bias.grad.clone())
        optimizer.step()
    return [*seen, *(p.detach().clone() for p in m.parameters())]


@on_ranks(2)
def test_all_ranks_skip_the_batch() -> None:
    with new_job(DEFERS):
        for layer in (0, 2):
            for skip in [*SKIPS, None]:
                alone = train(plain, layer, skip)
                for a, b in zip(alone, train(distributed, layer, skip), strict=True):
                    assert torch.equal(a, b), (layer, skip)
            alone = train(plain, layer, "optimizer.zero_grad")
            for a, b in zip(
                alone,
                train(partial(distributed, sharded=True), layer, "optimizer.zero_grad"),
                strict=True,
            ):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def one_rank_skips(layer: int, sharded: bool) -> str:
    m = model()
    optimizer = distributed(sgd(m), m, sharded=sharded)
    set_fails = fails_in(m, layer)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            set_fails(step == 6 and hvd.rank() == 1)
            try:
                backward(m, step)
            except OutOfMemoryError:
                optimizer.zero_grad()
                continue
            optimizer.step()
    except (InvalidUsage, HorovodInternalError) as error:
        return f"step {step}: {error}"
    return "no error"


def body_one_rank_skips(sharded: bool) -> list[str]:
    texts = []
    for layer in (0, 2):
        with new_job(DEFERS):
            texts.append(one_rank_skips(layer, sharded))
    return texts


@pytest.mark.parametrize("sharded", [False, True])
def test_one_rank_skips_the_batch(ranks: RankFactory, sharded: bool) -> None:
    for texts in zip(*ranks(2).run(body_one_rank_skips, sharded), strict=True):
        for (
            text
        ) in texts:  # of the rank that finds it first: the one that goes on, or the other one
            assert "given up" in text
            assert "Skip a batch on all ranks or on none" in text
            assert text.startswith(("step 6", "step 7"))  # the update of step 6 waits for readers
