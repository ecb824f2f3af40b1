"""Parameters that another thread reads, or completes, and parameters that cannot be completed."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory
from parity.test_other_subclasses import Kept, model_and_optimizer, one_step, rows
from torch import Tensor, nn
from torch.nn import functional

from hvd_order.torch.updates import overlap


class Fails:
    """A guard whose exchange has failed."""

    def before_parameter_read(self, parameters: list[Tensor]) -> None:
        raise KeyboardInterrupt("the reason")


@on_ranks(2)
def test_a_reader_gets_the_reason_why_a_parameter_cannot_be_finished() -> None:
    model, optimizer = model_and_optimizer(True)
    for step in range(4):
        one_step(model, optimizer, step)
    weight = model[0].weight
    guard, vars(weight)["_hvd_order_guard"] = vars(weight)["_hvd_order_guard"], Fails()
    for read in (
        lambda: weight + 1, lambda: weight.data, lambda: torch.ones(16).as_subclass(Kept) * weight,
        lambda: functional.layer_norm(rows(0), (16,), weight), lambda: nn.Parameter(weight),
        lambda: torch.func.grad(lambda w: w.sum())(weight),
    ):  # fmt: skip
        with pytest.raises(KeyboardInterrupt, match="the reason"):
            read()
    vars(weight)["_hvd_order_guard"] = guard
    assert torch.equal(weight.detach() + 0, weight.data)
    assert "_hvd_order_failure" not in vars(weight)


@on_ranks(2)
def test_a_tensor_that_another_thread_completes_needs_no_guard() -> None:
    model, optimizer = model_and_optimizer(True)
    for step in range(4):
        one_step(model, optimizer, step)
    parameter = model[0].weight
    del vars(parameter)["_hvd_order_guard"]  # as a thread sees it that has just asked for the class
    assert parameter.grad is not None
    assert parameter.shape == (32, 16)
    optimizer.flush()
    model(rows(4)).square().mean().backward()
    gradient = model[0].weight.grad
    kept = vars(gradient).pop("_hvd_order_guard")
    for use in (gradient.norm, gradient.detach, lambda: gradient.mul_(1.0)):
        with contextlib.suppress(RuntimeError):
            use()
    vars(gradient)["_hvd_order_guard"] = kept
    optimizer.step()
    optimizer.flush()


def body_read_elsewhere() -> str:
    model, optimizer = model_and_optimizer(True)
    for step in range(4):
        one_step(model, optimizer, step)
    assert optimizer.overlap_report().deferred_parameters > 0
    reader = threading.Thread(target=lambda: model(rows(9)))
    reader.start()
    reader.join()
    one_step(model, optimizer, 4)
    report = optimizer.overlap_report()
    assert report.deferred_parameters == 0
    return str(next(iter(report.not_deferred)))


def body_stepping_thread_ends() -> int:
    """A new thread for each epoch trains alone: all its updates are deferred."""
    model, optimizer = model_and_optimizer(True)
    for _ in range(3):
        thread = threading.Thread(
            target=lambda: [one_step(model, optimizer, step) for step in range(3)]
        )
        thread.start()
        thread.join()
    return int(optimizer.overlap_report().deferred_parameters)


def test_parameters_that_another_thread_reads_are_updated_at_once(ranks: RankFactory) -> None:
    assert ranks(2).run(body_read_elsewhere) == [overlap.OTHER_THREAD] * 2
    assert ranks(2).run(body_stepping_thread_ends) == [8, 8]
