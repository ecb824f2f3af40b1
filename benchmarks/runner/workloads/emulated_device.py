"""A model whose layers take their time asleep.

It is a real autograd graph over parameters of the real sizes: hooks fire, gradients are allocated
and accumulated, optimizers update. Only the arithmetic of a layer is replaced by sleep, as if an
accelerator did it, so that the ranks of one machine do not compete for its cores.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from benchmarks.runner.workloads.profiles import Layer, Profile
from benchmarks.runner.workloads.recorder import Recorder


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: EmulatedLayer, *parameters: Any) -> torch.Tensor:
        # Reading one element is a real read: it waits for an outstanding update, and a stale one
        # would change the gradient.
        with _unseen() if layer.by_kernels else contextlib.nullcontext():
            seen = [parameter.detach().view(-1)[0].item() for parameter in parameters]
        begin = time.monotonic()
        ctx.layer, ctx.seen = layer, seen
        y = x + seen[0]
        _sleep_until(begin + layer.profile.forward_s)
        layer.recorder.events.append((layer.profile.name, "forward", begin, time.monotonic()))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        begin = time.monotonic()
        layer: EmulatedLayer = ctx.layer
        mine = [
            gradient.fill_(layer.push * (1.0 + seen)).detach()
            for gradient, seen in zip(layer.gradients, ctx.seen, strict=True)
        ]
        _sleep_until(begin + layer.profile.backward_s)
        layer.recorder.events.append((layer.profile.name, "backward", begin, time.monotonic()))
        return gradients[0], None, *mine


def _unseen() -> Any:
    """As a kernel in C++ reads: past the class of its tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def _sleep_until(end: float) -> None:
    left = end - time.monotonic()
    if left > 0:
        time.sleep(left)


class EmulatedLayer(torch.nn.Module):
    """One layer of a profile."""

    def __init__(
        self,
        profile: Layer,
        push: float,
        recorder: Recorder,
        by_kernels: bool,
        gradients: list[torch.Tensor],
    ) -> None:
        """A layer whose backward pass fills ``gradients``.

        Args:
            push: scale of this rank's gradient.
            by_kernels: Python sees no reader.
        """
        super().__init__()
        self.by_kernels = by_kernels
        self.profile = profile
        self.push = push
        self.recorder = recorder
        self.tensors = torch.nn.ParameterList(torch.zeros(shape) for shape in profile.shapes)
        self.gradients = gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Run.apply(x, self, *self.tensors)
        return out


class EmulatedModel(torch.nn.Sequential):
    """All layers of a profile, one after the other."""

    def __init__(self, profile: Profile, rank: int, like: EmulatedModel | None = None) -> None:
        """A model of a profile.

        Args:
            rank: ranks get different gradients, as different data would give.
            like: a model of the same sizes that never trains at the same time; its gradients'
                memory is shared.
        """
        self.recorder = Recorder()
        # The same memory in every step, as an accelerator's caching allocator gives it. Fresh pages
        # would be the processor's affair, in a virtual machine even the host's.
        gradients = [
            [torch.zeros(shape) for shape in layer.shapes] if like is None else like[i].gradients
            for i, layer in enumerate(profile.layers)
        ]
        super().__init__(
            *[
                EmulatedLayer(layer, 1e-3 * (1 + rank), self.recorder, profile.by_kernels, mine)
                for layer, mine in zip(profile.layers, gradients, strict=True)
            ]
        )


def model_input() -> torch.Tensor:
    return torch.ones(1, requires_grad=True)


def make_bfloat16(model: torch.nn.Module) -> None:
    """Weights and gradients of 16 bits."""
    model.bfloat16()
    for layer in model.children():
        if isinstance(layer, EmulatedLayer):
            layer.gradients = [gradient.bfloat16() for gradient in layer.gradients]
