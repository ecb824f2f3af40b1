"""Errors for misuse that all kinds of distributed optimizer share, in Horovod's words."""

from __future__ import annotations

from typing import NoReturn

import torch

from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []

TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally. "
    "(parameter '{name}')"
)
ZEROED_IN_FLIGHT = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition. "
    "To skip a step after a complete backward pass, which all ranks must do, call "
    "optimizer.synchronize() first."
)


_NO_MORE = (
    "Gradients were computed more than backward_passes_per_step times before call to step(): those "
    "of parameter '{name}' are on their way to the other ranks since gradients were clipped or "
    "unscaled, or their norms read, and cannot take more. Clip after the last of the backward "
    "passes; before the next one call optimizer.step(), or optimizer.zero_grad() to drop them."
)


def too_many_passes(name: str, used_in_flight: bool) -> AssertionError:
    """The error of a gradient that comes again after it was sent.

    Args:
        used_in_flight: the program has used the gradients of the step since.
    """
    return AssertionError((_NO_MORE if used_in_flight else TOO_MANY_PASSES).format(name=name))


def check_usable(name: str, parameter: torch.Tensor, rank: int) -> None:
    """Refuses a parameter that has no elements yet, whose gradients have no known place."""
    begin = f"rank {rank}: parameter '{name}' "
    if torch.nn.parameter.is_lazy(parameter):
        raise InvalidUsage(
            begin + "has no shape yet: call the model once with a batch, which initializes lazy "
            "modules, and make the optimizer distributed after that"
        )
    if parameter.device.type == "meta":
        raise InvalidUsage(
            begin + "is on the device 'meta', so it has no elements: call "
            "model.to_empty(device=...) and initialize or load the weights first. Then make the "
            "optimizer, since to_empty() makes other parameters, and make it distributed"
        )
    if parameter.layout is not torch.strided:
        raise InvalidUsage(
            begin + f"has the layout {parameter.layout}, and gradients are summed for dense "
            "parameters (torch.strided) only: leave it to another optimizer"
        )
    plain = type(parameter) is torch.nn.Parameter and parameter.numel() > 0
    if plain and parameter.untyped_storage().nbytes() == 0:
        raise InvalidUsage(
            begin + "has no memory (something has freed its storage): give it elements, by "
            "p.data = ..., before the optimizer is made distributed"
        )


def check_gradient(entry: ParameterEntry, gradient: torch.Tensor) -> None:
    """Refuses a gradient in a dtype that no rank could foresee."""
    parameter = entry.parameter
    came = gradient.dtype
    if getattr(parameter, "grad_dtype", came) is None and came != parameter.dtype:
        raise InvalidUsage(
            f"the gradient of '{entry.name}' is {came}, its parameter {parameter.dtype}, and "
            "its grad_dtype is None, which allows any: ranks sum gradients of one dtype. Set "
            f"parameter.grad_dtype = {came} on every rank"
        )


def refuse_converted(entry: ParameterEntry) -> NoReturn:
    """Refuses a parameter that changed its kind while its gradients were being summed."""
    parameter = entry.parameter
    raise InvalidUsage(
        f"parameter '{entry.name}' became {parameter.dtype} of shape {tuple(parameter.shape)} on "
        f"{parameter.device} in the middle of a step; convert or resize it between step() and the "
        "next backward(), on every rank"
    )


def check_passes(passes: int) -> None:
    """Raises ValueError for an invalid ``backward_passes_per_step``."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")


_SKIP_TOGETHER = (
    "Skip a batch on all ranks or on none: let them agree first, for example with "
    "hvd.allreduce(torch.tensor(float(failed)), op=hvd.Max)"
)


def given_up_elsewhere(name: str, rank: int) -> InvalidUsage:
    """The error of a rank that goes on with a step which another rank has given up."""
    return InvalidUsage(
        f"rank {rank} goes on with a step that another rank has given up: that rank's backward "
        "pass ended by an exception, or its gradients were cleared, and it skips the batch. The "
        f"sum of the gradient of '{name}', among others, lacks its share. {_SKIP_TOGETHER}"
    )


def given_up_here(name: str, rank: int) -> InvalidUsage:
    """The error of a rank that has given up a step with which another rank goes on."""
    return InvalidUsage(
        f"rank {rank} has given up a step (its backward pass ended by an exception, or its "
        "gradients were cleared), and another rank goes on with it. The sum of the gradient of "
        f"'{name}', among others, lacks its share there. {_SKIP_TOGETHER}"
    )


def refuse_graph(name: str) -> None:
    """Refuses a gradient that has a graph of its own, as DDP and Horovod do."""
    raise InvalidUsage(
        f"the gradient of '{name}' has a graph: backward(create_graph=True), or a gradient set by "
        "hand, before a gradient is summed over the ranks, where the graph would be lost. Compute "
        "what depends on gradients with torch.autograd.grad(loss, parameters, create_graph=True), "
        "add it to the loss, and call backward() without create_graph"
    )


def check_sharded(uncompressed: bool, comm_is_allreduce: bool, is_adasum: bool) -> None:
    """Refuses what sharded optimizer state cannot be combined with."""
    if is_adasum:
        raise InvalidUsage("sharded=True needs sums of gradients; Adasum has none")
    if not uncompressed:
        raise InvalidUsage(
            "compression is for gradients, but with sharded=True parameters travel as well; drop "
            "it. Parameters of bfloat16 travel in 16 bits, with float32 master copies"
        )
    if not comm_is_allreduce:
        raise InvalidUsage("sharded=True needs all-reduces: parameter servers have the state")


def check_has_shards(is_sharded: bool) -> None:
    """Refuses `sharded_state_dict` of an optimizer of which each rank has the whole state."""
    if not is_sharded:
        raise InvalidUsage(
            "sharded_state_dict() needs DistributedOptimizer(..., sharded=True). Each rank has the "
            "whole state here: pass the result of torch.distributed.checkpoint.state_dict."
            "get_optimizer_state_dict(model, optimizer) to torch.distributed.checkpoint"
        )
