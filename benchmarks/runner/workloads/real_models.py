"""Models that compute for real: the demo's GPT, a small convolutional network, linear layers.

Each is a chain of stages, with a mark after each that notes when the two passes come by.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.runner.workloads.recorder import Recorder
from hvd_order.tools.demo.gpt import Gpt, GptConfig, next_token_loss


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: StagedModel, stage: str) -> torch.Tensor:
        ctx.model, ctx.stage = model, stage
        model.forward_done(stage)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.model.backward_begins(ctx.stage)
        return gradients[0], None, None


class StagedModel(nn.Sequential):
    """Maps a batch to a loss."""

    def __init__(self, stages: dict[str, nn.Module]) -> None:
        super().__init__(OrderedDict(stages))
        self.recorder = Recorder()
        self._since = 0.0
        self._in_backward: str | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self._since = time.monotonic()
        x = batch
        for name, stage in self.named_children():
            x = _Mark.apply(stage(x), self, name)
        return x

    def forward_done(self, stage: str) -> None:
        self._note(stage, "forward")

    def backward_begins(self, stage: str) -> None:
        if self._in_backward is None:
            self._since = time.monotonic()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)
        else:
            self._note(self._in_backward, "backward")
        self._in_backward = stage

    def _backward_done(self) -> None:
        assert self._in_backward is not None
        self._note(self._in_backward, "backward")
        self._in_backward = None

    def _note(self, stage: str, kind: str) -> None:
        now = time.monotonic()
        self.recorder.events.append((stage, kind, self._since, now))
        self._since = now


class _Embed(nn.Module):
    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.tokens, self.positions = gpt.embedding, gpt.positions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return out


class _Predict(nn.Module):
    targets: torch.Tensor

    def __init__(self, gpt: Gpt, targets: torch.Tensor) -> None:
        super().__init__()
        self.norm, self.head = gpt.norm, gpt.head
        self.register_buffer("targets", targets, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next_token_loss(self.head(self.norm(x)), self.targets)


class _Classify(nn.Module):
    targets: torch.Tensor

    def __init__(self, inputs: int, targets: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 10)
        self.register_buffer("targets", targets, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.linear(x), self.targets)


class _Mean(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.linear(x), torch.zeros_like(x))


def demo_gpt(size: int | None, generator: torch.Generator) -> Made:
    """The model of `hvd-order demo`, 13 MB."""
    gpt = Gpt(GptConfig())
    text = torch.randint(
        gpt.config.vocabulary, (size or 4, gpt.config.context + 1), generator=generator,
        device="cpu",
    )  # fmt: skip
    blocks = {f"block{i}": block for i, block in enumerate(gpt.blocks)}
    stages = {"embed": _Embed(gpt), **blocks, "predict": _Predict(gpt, text[:, 1:])}
    return StagedModel(stages), text[:, :-1]


def small_cnn(size: int | None, generator: torch.Generator) -> Made:
    """Four convolutions and two linear layers on images of 32 x 32, 23 MB."""
    size = size or 16
    images = torch.randn(size, 3, 32, 32, generator=generator, device="cpu")
    labels = torch.randint(10, (size,), generator=generator, device="cpu")
    widths = [3, 64, 128, 256, 512]
    stages: dict[str, nn.Module] = {
        f"conv{i}": nn.Sequential(
            nn.Conv2d(widths[i], widths[i + 1], 3, stride=1 if i == 0 else 2, padding=1), nn.ReLU()
        )
        for i in range(4)
    }
    stages["fc"] = nn.Sequential(nn.Flatten(), nn.Linear(512 * 4 * 4, 512), nn.ReLU())
    stages["classify"] = _Classify(512, labels)
    return StagedModel(stages), images


def linear8(size: int | None, generator: torch.Generator) -> Made:
    """Eight linear layers of 256, 2.1 MB: as little computation as there is."""
    stages: dict[str, nn.Module] = {
        f"linear{i}": nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for i in range(7)
    }
    stages["predict"] = _Mean(256)
    return StagedModel(stages), torch.randn(size or 32, 256, generator=generator, device="cpu")


Made = tuple[StagedModel, torch.Tensor]
REAL_MODELS: dict[str, Callable[[int | None, torch.Generator], Made]] = {
    "demo_gpt": demo_gpt,
    "linear8": linear8,
    "small_cnn": small_cnn,
}
"""Make a model and its batch, of so many samples or as many as suit a CPU."""
