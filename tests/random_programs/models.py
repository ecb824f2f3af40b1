"""Small models, each with a way of its own to hold or read its parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 4


class Block(nn.Module):
    """One layer; ``skipped`` leaves it out (LayerDrop)."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.skipped = False
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skipped else x + torch.tanh(self.linear(self.norm(x)))


def blocks(norm: bool = False, count: int = 3) -> nn.Sequential:
    return nn.Sequential(*[Block(norm) for _ in range(count)], nn.Linear(WIDTH, 2))


def perceptron() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)
    )


def dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Functional(nn.Module):
    """Parameters that no module of their own reads; one is read long before its place."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.w[2].mean() + 1
        for w in self.w:
            x = torch.tanh(x @ w * self.scale)
        return x * factor


class Recurrent(nn.Module):
    """Keeps a list of its weights from the day it was built, and hands it to one C++ operator."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, WIDTH // 2, 2))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, dim_feedforward=6, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.stack([x, x * 2], dim=1)).mean(dim=1))


def spectral() -> nn.Module:
    """Its forward pass writes buffers that depend on a parameter."""
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, 2)
    )


def weight_normed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, 2)
    )


class Embedded(nn.Module):
    """A dense gradient for a table of which a rank reads some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, :2].abs().mul(10).long() % 6
        return self.head(self.table(rows).mean(dim=1) + x)


class Scripted(nn.Module):
    """One layer runs in TorchScript, so only C++ reads its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def scripted() -> nn.Module:
    # TorchScript optimizes what has run a few times, which changes the last bits of its results;
    # one process runs everything twice as often as a rank.
    torch._C._jit_set_profiling_executor(False)
    torch._C._jit_set_profiling_mode(False)
    model = Scripted().double()
    model.inner = torch.jit.script(model.inner)  # type: ignore[assignment]
    return model


class Product(torch.autograd.Function):
    """Reads its weight inside of forward and backward, as a kernel in C++ would."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad @ w.t(), x.t() @ grad


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for w in self.w:
            x = torch.tanh(Product.apply(x, w))
        return x


class Special(nn.Parameter):
    """A subclass, as quantization and sharding libraries have."""


class Kinded(nn.Parameter):
    """A subclass whose own subclasses need an argument."""

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()


class Subclassed(nn.Module):
    def __init__(self, middle: type[nn.Parameter] = Special) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.middle = middle(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) @ self.middle))


def flat() -> nn.Module:
    """All parameters are views of one buffer, which the model keeps as ``flat``."""
    model = perceptron().double()
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = whole[at : at + p.numel()].view_as(p)
        at += p.numel()
    model.flat = whole
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron, "blocks": blocks, "normed": lambda: blocks(norm=True),
    "dropout": dropout, "tied": Tied, "functional": Functional, "recurrent": Recurrent,
    "attention": Attention, "weight_norm": weight_normed, "spectral_norm": spectral,
    "embedding": Embedded, "scripted": scripted, "custom_function": CustomFunction,
    "subclassed": Subclassed, "subclassed_by_kind": lambda: Subclassed(Kinded), "flat": flat,
}  # fmt: skip


def make_model(name: str, seed: int = 1, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model of a type; "flat" of float64 alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]().to(dtype)
