"""Small training programs, each with one trap. They know nothing of ranks but the rows they get."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS = 12  # divides by 2 and 3, and again by 2 passes
WIDTH = 6


def perceptron() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    )


class Program:
    """An ordinary training loop; subclasses change what their names say."""

    passes = 1
    overlaps = True  # whether updates are deferred from the third step on

    def __init__(self) -> None:
        self.model: nn.Module = perceptron()

    def trainable(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def loss(self, x: Tensor, y: Tensor, first_rank: Tensor) -> Tensor:
        """Mean over the rows; ``first_rank`` marks those that rank 0 has when there are ranks."""
        del first_rank
        return nn.functional.mse_loss(self.forward(x), y)

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Once, with the optimizer that will be used."""

    def end_of_step(self) -> None:
        """After each update."""


class Plain(Program):
    pass


class ZeroInPlace(Program):
    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class ModelZeroGrad(Program):
    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        self.model.zero_grad()


class NeverZeroed(Program):
    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        pass


class ZeroAfterStep(Program):
    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()


class Scheduled(Program):
    def start(self, optimizer: torch.optim.Optimizer) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    def end_of_step(self) -> None:
        self.scheduler.step()


class Accumulating(Program):
    passes = 2


class ClippedByRitual(Program):
    overlaps = False

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        if not hasattr(optimizer, "synchronize"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            optimizer.step()
            return
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()


class Clipped(Program):
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        optimizer.step()


class Frozen(Program):
    def __init__(self) -> None:
        super().__init__()
        self.model[0].weight.requires_grad_(False)


class UnusedEverywhere(Program):
    def __init__(self) -> None:
        super().__init__()
        self.model.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self.model)[:-1]:
            x = layer(x)
        return x


class UnusedOnSomeRanks(Program):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, 2)

    def trainable(self) -> Iterable[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()
        yield from ((f"branch.{name}", p) for name, p in self.branch.named_parameters())

    def loss(self, x: Tensor, y: Tensor, first_rank: Tensor) -> Tensor:
        out = self.model(x)
        if first_rank.any():
            out = out + self.branch(x) * first_rank[:, None]
        return nn.functional.mse_loss(out, y)


class Tied(Program):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.model[1].weight = self.model[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[:, :2]


class Functional(Program):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.model[4].weight.mean()  # before the module that owns it runs
        return nn.functional.linear(
            self.model[:4](x), self.model[4].weight * scale, self.model[4].bias
        )


class Transformer(Program):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, dim_feedforward=8, dropout=0.0, batch_first=True
        )
        self.model = nn.ModuleList([self.layer, nn.Linear(WIDTH, 2)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.flip(1), x * 2], dim=1)
        return self.model[1](self.layer(tokens).mean(dim=1))


class Recurrent(Program):
    """An LSTM hands its operator a list of parameters that it made when it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList([nn.LSTM(2, 5, num_layers=2, batch_first=True), nn.Linear(5, 2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.model[1](self.model[0](x.view(-1, WIDTH // 2, 2))[0][:, -1])


class CalledTwice(Program):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.model[1](self.model[0](x))
        return self.model[4](self.model[2](self.model[2](hidden)))


class Checkpointed(Program):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.model[0](x)
        x = checkpoint(self.model[1:4], x, use_reentrant=self.reentrant)
        return self.model[4](x)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Compiled(Program):
    """The whole model in one graph; every parameter is needed at its entry."""

    backend = "aot_eager"

    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.call: Callable[[Tensor], Tensor] = torch.compile(self.model, backend=self.backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class CompiledInPlace(Program):
    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.model.compile(backend="aot_eager")


class CompiledByInductor(Compiled):
    backend = "inductor"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) + x


class CompiledBlocks(Program):
    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.model = nn.Sequential(*[Block() for _ in range(3)])
        for block in self.model:
            block.compile(backend="aot_eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[:, :2]


PROGRAMS: dict[str, type[Program]] = {
    kind.__name__: kind
    for kind in (
        Plain, ZeroInPlace, ModelZeroGrad, NeverZeroed, ZeroAfterStep, Scheduled, Accumulating,
        ClippedByRitual, Clipped, Frozen, UnusedEverywhere, UnusedOnSomeRanks, Tied, Functional,
        Transformer, Recurrent, CalledTwice, Checkpointed, CheckpointedReentrant, Compiled,
        CompiledInPlace, CompiledBlocks, CompiledByInductor,
    )
}  # fmt: skip

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "AdamW-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.3, max_iter=4, history_size=4),
}
