"""Ways to train, each runnable by one process with the whole batch and by many with a share each."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import hvd_order.torch as hvd
from hvd_order.torch.read_guard import PendingParameter

STEPS = 20
BATCH = 12  # of all ranks together; divides by 2 and 3
WIDTH = 6

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


# ---- models -----------------------------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.hidden(self.first(x).tanh()))


class Unused(Perceptron):
    """`extra` is never used, `sometimes` by one rank a step and in every fourth step by none."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, with_sometimes: bool = False) -> torch.Tensor:
        hidden = self.hidden(self.first(x).tanh())
        return self.last(self.sometimes(hidden).tanh() if with_sometimes else hidden)


class Tied(nn.Module):
    """The first weight is the last one too, under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.outside = nn.Linear(WIDTH, WIDTH)
        self.outside.weight = self.inside.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(self.between(self.inside(x).tanh()).tanh())[:, :2]


class Functional(nn.Module):
    """The parent uses the weight of a child whose forward never runs, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.child = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, self.child.weight.t() * self.scale, self.child.bias)
        return self.last(hidden.tanh())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.embed(x)[:, None, :] * torch.linspace(0.5, 1, 3, dtype=x.dtype)[None, :, None]
        return self.last(self.block(words).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(2, 5, num_layers=2, batch_first=True)
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cells(x.view(-1, WIDTH // 2, 2))[0][:, -1])


class CalledTwice(Perceptron):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.hidden(self.hidden(self.first(x))))


class Checkpointed(Perceptron):
    """Blocks whose forward runs again in the backward pass."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        x = checkpoint(self.hidden, x, use_reentrant=self.reentrant)
        return checkpoint(self.last, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


# ---- scenarios --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """One way to train.

    Attributes:
        deferred: updates are outstanding after step(), from the third on.
        at_once: parameters that are up to date after step() nevertheless, by prefix.
        zero: when and how gradients are cleared.
        by_rank: what is computed depends on the rank, so the whole batch is a mean over shares.
        without: optimizers for which the scenario means nothing.
    """

    model: type[nn.Module] = Perceptron
    deferred: bool = True
    at_once: tuple[str, ...] = ()
    zero: str = "before"
    scheduler: str = ""
    passes: int = 1
    clip: str = ""
    freeze: str = ""
    unfreeze_at: int = STEPS
    by_rank: bool = False
    compile: str = ""
    backend: str = "aot_eager"
    loop: str = "ordinary"
    steps: int = STEPS
    without: frozenset[str] = field(default_factory=frozenset)


# A closure clears and computes gradients itself, as often as LBFGS wants: clearing elsewhere, passes
# that add up and the ritual around step() mean nothing there.
_NO_CLOSURE = frozenset({"LBFGS"})

SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(),
    "zero_after_step": Scenario(zero="after"),
    "zero_in_place": Scenario(zero="in place", without=_NO_CLOSURE),
    "model_zero_grad": Scenario(zero="model", without=_NO_CLOSURE),
    "model_zero_in_place": Scenario(zero="model in place", without=_NO_CLOSURE),
    "never_zero": Scenario(zero="never", without=_NO_CLOSURE),
    "scheduler_before_wrapping": Scenario(scheduler="before"),
    "scheduler_after_wrapping": Scenario(scheduler="after", zero="after"),
    "accumulation": Scenario(passes=2, without=_NO_CLOSURE),
    "accumulation_zero_in_place": Scenario(passes=2, zero="in place", without=_NO_CLOSURE),
    "clip_ritual": Scenario(clip="ritual", deferred=False, without=_NO_CLOSURE),
    "clip": Scenario(clip="plain", deferred=False),
    "frozen": Scenario(freeze="first"),
    # Unfreezing changes the set of parameters; LBFGS fixes that when it is made.
    "unfrozen_later": Scenario(
        freeze="first", unfreeze_at=8, at_once=("first",), without=_NO_CLOSURE
    ),
    "unused": Scenario(model=Unused, at_once=("extra", "sometimes")),
    "unused_on_some_ranks": Scenario(
        model=Unused, at_once=("extra", "sometimes"), by_rank=True, zero="after"
    ),
    "unused_on_some_ranks_never_zero": Scenario(
        model=Unused, at_once=("extra", "sometimes"), by_rank=True, zero="never", without=_NO_CLOSURE
    ),
    "tied": Scenario(model=Tied),
    "functional": Scenario(model=Functional),
    "transformer": Scenario(model=Attention),
    "lstm": Scenario(model=Recurrent, zero="after"),
    "called_twice": Scenario(model=CalledTwice),
    "checkpoint": Scenario(model=Checkpointed),
    "checkpoint_reentrant": Scenario(model=CheckpointedReentrant),
    "compiled_blocks": Scenario(model=Blocks, compile="blocks"),
    "compiled_in_place": Scenario(model=Blocks, compile="in place"),
    "compiled_model": Scenario(compile="model"),
    # Two optimizers with a closure each are two separate trainings.
    "gan": Scenario(model=Adversaries, loop="gan", without=_NO_CLOSURE),
    "gan_model_zero_grad": Scenario(
        model=Adversaries, loop="gan", zero="model", without=_NO_CLOSURE
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What one rank reports of a scenario.

    Attributes:
        digests: of all weights and their being None or not, one for each run.
        error: largest relative difference from one process; None where it was not computed.
        where: the parameter of that difference.
        not_deferred: "step: parameter" that was up to date after step() and should not have been.
    """

    digests: list[str]
    error: float | None
    where: str
    not_deferred: list[str]


def body(scenario: str, optimizer: str, runs: int, backend: str | None = None) -> Outcome:
    """Trains `runs` times on all ranks, and on rank 0 in one process as well."""
    how = SCENARIOS[scenario]
    not_deferred: list[str] = []
    digests = []
    model = None
    for run in range(runs):
        torch._dynamo.reset()
        model = _Training(how, optimizer, hvd.rank(), hvd.size(), not_deferred).run(
            shake=run > 0, backend=backend or how.backend
        )
        digests.append(_digest(model))
    if hvd.rank() > 0:
        return Outcome(digests, None, "", not_deferred)
    alone = _Training(how, optimizer, None, hvd.size(), []).run(shake=False, backend="")
    assert model is not None
    error, where = 0.0, ""
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), f"{name}.grad: {ours.grad}"
        for a, b in ((ours, theirs), (ours.grad, theirs.grad)):
            if a is not None and b is not None and a is ours:
                difference = float((a - b).detach().abs().max() / b.detach().abs().max())
                if not difference <= error:
                    error, where = difference, name
    return Outcome(digests, error, where, not_deferred)


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
        digest.update(b"None" if parameter.grad is None else b"set")
    return digest.hexdigest()


class _Training:
    def __init__(
        self,
        scenario: Scenario,
        optimizer: str,
        rank: int | None,
        size: int,
        not_deferred: list[str],
    ) -> None:
        """`rank` None: one process with the whole batch of `size` ranks."""
        self.scenario = scenario
        self.optimizer_name = optimizer
        self.rank = rank
        self.size = size
        self.not_deferred = not_deferred

    def run(self, shake: bool, backend: str) -> nn.Module:
        scenario = self.scenario
        torch.manual_seed(4)
        self.model = scenario.model().double()
        if scenario.freeze:
            self.model.get_submodule(scenario.freeze).requires_grad_(False)
        self.forward = self._compiled(backend) if backend else self.model
        self.shake = shake
        (self._gan if scenario.loop == "gan" else self._ordinary)()
        return self.model

    def _compiled(self, backend: str) -> nn.Module:
        kind = self.scenario.compile
        if kind == "model":
            return torch.compile(self.model, backend=backend, fullgraph=True)  # type: ignore
        if kind:
            blocks: Any = self.model.blocks
            for i, block in enumerate(blocks):
                if kind == "in place":
                    block.compile(backend=backend, fullgraph=True)
                else:
                    blocks[i] = torch.compile(block, backend=backend, fullgraph=True)
        return self.model

    def _wrap(self, optimizer: Optimizer, module: nn.Module) -> Optimizer:
        if self.rank is None:
            return optimizer
        return hvd.DistributedOptimizer(
            optimizer,
            named_parameters=module.named_parameters(),
            backward_passes_per_step=self.scenario.passes,
        )

    def _data(self, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + micro)
        x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
        y = torch.randn(BATCH, 2, generator=generator, dtype=torch.float64)
        return x, y

    def _loss(self, step: int, micro: int = 0) -> torch.Tensor:
        x, y = self._data(step, micro)
        if self.rank is not None:
            return self._loss_of_rank(step, x, y, self.rank)
        if not self.scenario.by_rank:
            return functional.mse_loss(self.forward(x), y)
        losses = [self._loss_of_rank(step, x, y, rank) for rank in range(self.size)]
        return torch.stack(losses).mean()

    def _loss_of_rank(
        self, step: int, x: torch.Tensor, y: torch.Tensor, rank: int
    ) -> torch.Tensor:
        mine = slice(rank, None, self.size)
        kwargs = {}
        if self.scenario.by_rank:
            kwargs["with_sometimes"] = step % 4 != 3 and step % self.size == rank
        return functional.mse_loss(self.forward(x[mine], **kwargs), y[mine])

    def _pause(self, step: int) -> None:
        """Other timing in another run; results must not depend on it."""
        if self.shake and self.rank is not None and (step + self.rank) % 3 == 0:
            time.sleep(0.002)

    def _zero(self, optimizer: Optimizer, module: nn.Module, after_step: bool) -> None:
        zero = self.scenario.zero
        if after_step != (zero in ("after", "model")) or zero == "never":
            return
        if zero == "model":
            module.zero_grad()
        elif zero == "model in place":
            module.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad(set_to_none=zero != "in place")

    def _ordinary(self) -> None:
        scenario = self.scenario
        optimizer = OPTIMIZERS[self.optimizer_name](self.model.parameters())
        scheduler: Any = None
        if scenario.scheduler == "before":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        optimizer = self._wrap(optimizer, self.model)
        if scenario.scheduler == "after":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        for step in range(scenario.steps):
            if step == scenario.unfreeze_at:
                self.model.requires_grad_(True)
            if self.optimizer_name == "LBFGS":
                self._step_with_closure(optimizer, step)
            else:
                self._zero(optimizer, self.model, after_step=False)
                for micro in range(scenario.passes):
                    self._loss(step, micro).backward()
                    self._pause(step + micro)
                self._clip_and_step(optimizer)
                self._check_deferred(step, self.model)
            if scheduler is not None:
                scheduler.step()
            self._zero(optimizer, self.model, after_step=True)

    def _step_with_closure(self, optimizer: Any, step: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self._loss(step)
            loss.backward()
            if self.scenario.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
            return loss

        optimizer.step(closure)

    def _clip_and_step(self, optimizer: Any) -> None:
        clip = self.scenario.clip
        ritual = clip == "ritual" and self.rank is not None
        if ritual:
            optimizer.synchronize()
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        with optimizer.skip_synchronize() if ritual else contextlib.nullcontext():
            optimizer.step()

    def _gan(self) -> None:
        """The critic learns from both, the generator through the critic."""
        generator: Any = self.model.generator
        critic: Any = self.model.critic
        make = OPTIMIZERS[self.optimizer_name]
        for_generator = self._wrap(make(generator.parameters()), generator)
        for_critic = self._wrap(make(critic.parameters()), critic)
        mine = slice(None) if self.rank is None else slice(self.rank, None, self.size)
        zero_model = self.scenario.zero == "model"
        for step in range(self.scenario.steps):
            real = self._data(step)[0][mine]
            noise = self._data(step, 1)[0][mine]

            _ = critic.zero_grad() if zero_model else for_critic.zero_grad()
            made = generator(noise)
            (critic(made.detach()) - critic(real)).tanh().mean().backward()
            for_critic.step()
            self._check_deferred(step, critic)
            self._pause(step)

            _ = generator.zero_grad() if zero_model else for_generator.zero_grad()
            (-critic(made)).mean().backward()  # reaches the critic as well
            for_generator.step()
            self._check_deferred(step, generator)

    def _check_deferred(self, step: int, module: nn.Module) -> None:
        if self.rank is None or step < 2:
            return
        scenario = self.scenario
        for name, parameter in module.named_parameters():
            pending = type(parameter) is PendingParameter
            expected = scenario.deferred and parameter.requires_grad
            if expected != pending and not name.startswith(scenario.at_once or ("//",)):
                self.not_deferred.append(f"{step}: {name}")
