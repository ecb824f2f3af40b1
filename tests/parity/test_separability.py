"""Which updates are put off, and that training equals one process whichever optimizer it is.

What must not be put off, and is not run to find out: tests/unit/torch/test_separability.py; that it
equals one process: lookahead, counting and the like in tests/random_programs.

Two ranks, float64, against one process that adds up the same two halves: sums of two are exact, so
the tolerance is one for rounding, not for luck.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import helpers.environments.torchvision_operators  # noqa: F401  before timm
import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory
from torch import Tensor, nn
from torch.optim import Optimizer

import hvd_order.torch as hvd

STEPS = 12
ROWS = 8
TOLERANCE = 1e-12

Make = Callable[[list[nn.Parameter]], Optimizer]


def rows(step: int) -> Tensor:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 4, generator=numbers, dtype=torch.float64)


def model_of_matrices(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 6, bias), nn.Tanh(), nn.Linear(6, 5, bias), nn.Tanh(), nn.Linear(5, 2, bias)
    ).double()


def ordinary(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x).square().mean()


@dataclass
class Case:
    """One optimizer.

    Attributes:
        loss: of a model, rows and the number of the step.
        how: further arguments of DistributedOptimizer.
        deferred: whether its updates are put off.
    """

    make: Make
    loss: Callable[[nn.Module, Tensor, int], Tensor] = ordinary
    how: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = model_of_matrices
    deferred: bool = False


def train(case: Case, distributed: bool) -> dict[str, Any]:
    model = case.model()
    optimizer = case.make(list(model.parameters()))
    if distributed:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), **case.how
        )
    deferred = []
    for step in range(STEPS):
        optimizer.zero_grad()
        halves = rows(step).chunk(2)
        for half in [halves[hvd.rank()]] if distributed else halves:
            loss = case.loss(model, half, step)
            (loss if distributed else loss / 2).backward()
        optimizer.step()
        if distributed and step >= 3:  # the first two learn who reads what
            report = optimizer.overlap_report()
            deferred.append(report.deferred_parameters / report.parameters)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {
        "weights": weights,
        "next random number": torch.rand(1).item(),  # whoever draws in between changes it
        "deferred": deferred,
    }


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Relative to the largest weight of each parameter; infinite where one alone is not finite."""
    largest = 0.0
    for name, a in one.items():
        b = other[name]
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        error = (a - b).abs().nan_to_num(0.0).max() / b.nan_to_num(0.0).abs().max().clamp(min=1e-30)
        largest = max(largest, float(error))
    return largest


def check(case: Case) -> None:
    ours, alone = train(case, distributed=True), train(case, distributed=False)
    assert largest_difference(ours["weights"], dict(case.model().named_parameters())) > 0, "moved"
    assert largest_difference(ours["weights"], alone["weights"]) <= TOLERANCE
    assert ours["next random number"] == alone["next random number"]
    assert set(ours["deferred"]) == {float(case.deferred)}


def body_new_job(tune: str | None) -> None:
    hvd.shutdown()
    if tune is None:
        del os.environ["HVD_ORDER_TUNE"]
    else:
        os.environ["HVD_ORDER_TUNE"] = tune
    hvd.init()


@pytest.fixture(scope="module", autouse=True)
def no_trials(ranks: RankFactory) -> Iterator[None]:
    """Those of a process's first model may choose DDP's way, in which nothing is deferred."""
    ranks(2).run(body_new_job, "0")
    yield
    ranks(2).run(body_new_job, None)


# ---- what is known of torch's own -------------------------------------------------------------

COMMON: dict[str, dict[str, Any]] = {
    "plain": {},
    "foreach": {"foreach": True},
    "maximize": {"maximize": True},
}
DECAY = {"weight_decay": 0.01}
RATE = {"tensor lr": {"lr": torch.tensor(0.01, dtype=torch.float64)}}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "SGD": {
        **COMMON, **RATE, "fused": {"fused": True}, "decay": DECAY,
        "momentum": {"momentum": 0.9, "dampening": 0.1, **DECAY},
        "nesterov": {"momentum": 0.9, "nesterov": True, "foreach": True},
        "fused momentum": {"momentum": 0.9, "nesterov": True, "fused": True, **DECAY},
    },
    "Adam": {
        **COMMON, **RATE, "fused": {"fused": True}, "amsgrad": {"amsgrad": True, **DECAY},
        "fused amsgrad": {"amsgrad": True, "fused": True, "maximize": True},
        "tensor betas": {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
        "decoupled": {"decoupled_weight_decay": True, **DECAY},
    },
    "AdamW": {**COMMON, **RATE, "fused": {"fused": True}, "amsgrad": {"amsgrad": True}},
    "Adagrad": {
        **COMMON, **RATE, "fused": {"fused": True},
        "decays": {"lr_decay": 0.1, "initial_accumulator_value": 0.2, **DECAY},
    },
    "Adadelta": {**COMMON, **RATE, "decay": DECAY},
    "Adamax": {**COMMON, **RATE, "decay": DECAY},
    "NAdam": {**COMMON, **RATE, "decay": {"decoupled_weight_decay": True, **DECAY}},
    "RAdam": {**COMMON, **RATE, "decay": {"decoupled_weight_decay": True, **DECAY}},
    "RMSprop": {
        **COMMON, **RATE, "momentum": {"momentum": 0.9, "centered": True, **DECAY},
        "momentum, foreach": {"momentum": 0.9, "centered": True, "foreach": True},
    },
    "Rprop": {**COMMON, **RATE, "etas": {"etas": (0.4, 1.3), "step_sizes": (1e-5, 1.0)}},
    "ASGD": {**COMMON, **RATE, "averaging": {"t0": 4, "lambd": 0.01, **DECAY}},
    "Adafactor": {
        **COMMON, **RATE, "eps": {"eps": (1e-8, 1e-3), "d": 2.0, **DECAY},
        "eps, foreach": {"eps": (1e-8, 1e-3), "foreach": True, "beta2_decay": -0.5},
    },
    "Muon": {
        "plain": {}, **RATE, "momentum": {"nesterov": False, "momentum": 0.8},
        "rms": {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    },
}  # fmt: skip


def known_case(optimizer: str, options: dict[str, Any]) -> Case:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return getattr(torch.optim, optimizer)(parameters, **{"lr": 0.01, **copy.deepcopy(options)})

    model = (lambda: model_of_matrices(bias=False)) if optimizer == "Muon" else model_of_matrices
    return Case(make, model=model, deferred=True)


KNOWN: dict[str, Callable[[], Case]] = {
    f"{optimizer}, {name}": lambda optimizer=optimizer, options=options: known_case(  # type: ignore[misc]
        optimizer, options
    )
    for optimizer, named in OPTIONS.items()
    if hasattr(torch.optim, optimizer)
    for name, options in named.items()
}


@pytest.mark.parametrize("name", KNOWN)
@on_ranks(2)
def test_what_is_known_is_deferred_and_equals_one_process(name: str) -> None:
    check(KNOWN[name]())


FIRST_OF_ITS_KIND = """
import torch
from hvd_order.torch.updates.separability import separability
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
print(separability(optimizer, torch.optim.AdamW).separable)
"""


def test_a_class_that_inherits_step_is_known_if_it_is_made_first() -> None:
    # torch decorates step() in the class of the first object, so nobody may be before it.
    done = subprocess.run(
        [sys.executable, "-c", FIRST_OF_ITS_KIND], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n", done.stderr


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# ---- what is declared -----------------------------------------------------------


class Counting(torch.optim.SGD):
    """Takes smaller steps from the ninth call of step() on."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * (0.1 if self.calls > 8 else 1.0) * p.grad


class Signs(Optimizer):
    """Each parameter by itself, with state; nobody has read it."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.1)
                    p -= group["lr"] * mean.sign()


class DeclaredSigns(Signs):
    hvd_order_separable = True


class SameStep(DeclaredSigns):
    """Inherits the declaration with the step."""


class OtherStep(DeclaredSigns):
    """Has a step of its own, of which nobody has said anything."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


RIGHT: dict[str, Callable[[], Case]] = {
    "keyword": lambda: Case(Signs, how={"separable": True}, deferred=True),
    "keyword that is wrong": lambda: Case(lambda ps: Counting(ps, lr=0.1), how={"separable": True}),
    "class": lambda: Case(DeclaredSigns, deferred=True),
    "subclass": lambda: Case(SameStep, deferred=True),
    "subclass with a step": lambda: Case(OtherStep),
    "undeclared": lambda: Case(Signs),
    "keyword against the class": lambda: Case(DeclaredSigns, how={"separable": False}),
    "known, and declared not to be": lambda: Case(sgd, how={"separable": False}),
    "subclass of a known one": lambda: Case(lambda ps: type("Mine", (torch.optim.SGD,), {})(ps)),
}


@pytest.mark.parametrize("name", RIGHT)
@on_ranks(2)
def test_a_declaration_is_heard(name: str) -> None:
    check(RIGHT[name]())


# ---- others' packages -------------------------------------------------------------------------


def timm_case(name: str, deferred: bool, **options: Any) -> Callable[[], Case]:
    def made() -> Case:
        import timm.optim

        make = getattr(timm.optim, name)
        return Case(lambda ps: make(ps, **{"lr": 0.01, **options}), deferred=deferred)

    return made


def timm_lookahead(k: int) -> Case:
    import timm.optim

    return Case(lambda ps: timm.optim.Lookahead(sgd(ps), k=k))


TIMM: dict[str, Callable[[], Case]] = {
    "Lookahead": lambda: timm_lookahead(6),
    "Lookahead, k=100": lambda: timm_lookahead(100),
    "Lamb": timm_case("Lamb", False),
    "Adan": timm_case("Adan", False),
    "Adafactor without a rate": timm_case("Adafactor", False, lr=None),
    **{
        name: timm_case(name, True, **options)
        for name, options in {
            "AdaBelief": {}, "Adafactor": {}, "AdafactorBigVision": {}, "AdamP": {},
            "AdamWLegacy": {}, "Adopt": {}, "LaProp": {}, "Lars": {"momentum": 0.9},
            "Lion": {"weight_decay": 0.1, "caution": True}, "MADGRAD": {}, "Mars": {},
            "NAdamLegacy": {}, "NAdamW": {"foreach": True}, "NvNovoGrad": {}, "RAdamLegacy": {},
            "RMSpropTF": {"momentum": 0.9}, "SGDP": {"momentum": 0.9},
            "SGDW": {"momentum": 0.9, "foreach": True},
        }.items()
    },
}  # fmt: skip


def body_timm(name: str) -> None:
    check(TIMM[name]())


@pytest.mark.parametrize("name", TIMM)
def test_timm(ranks: RankFactory, name: str) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed (third-party requirements)")
    if name not in ("Lookahead", "Lookahead, k=100") and timm.__version__ != "1.0.31":
        pytest.skip(f"timm {timm.__version__} has not been read, so nothing of it is deferred")
    ranks(2).run(body_timm, name)


# ---- a tensor among the settings --------------------------------------------------------------


def body_betas_changed() -> float:
    """Betas on the device, changed in place after step(): the update was asked for before."""
    results = []
    for distributed in (True, False):
        model = model_of_matrices()
        optimizer: Any = torch.optim.Adam(
            model.parameters(), lr=0.01, betas=(torch.tensor(0.9), torch.tensor(0.99))
        )
        betas = optimizer.param_groups[0]["betas"]
        if distributed:
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters()
            )
        for step in range(STEPS):
            optimizer.zero_grad()
            halves = rows(step).chunk(2)
            for half in [halves[hvd.rank()]] if distributed else halves:
                loss = ordinary(model, half, step)
                (loss if distributed else loss / 2).backward()
            optimizer.step()
            betas[0].fill_(0.5 if step % 2 else 0.9)
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return largest_difference(*results)


def test_tensors_among_the_settings_are_those_of_the_step(ranks: RankFactory) -> None:
    assert max(ranks(2).run(body_betas_changed)) <= TOLERANCE


# ---- drop-in ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_parameter_names_are_where_horovod_has_them() -> None:
    model = model_of_matrices()
    optimizer: Any = hvd.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters()
    )
    wanted = {p: name for name, p in model.named_parameters()}
    assert optimizer._parameter_names == wanted
    more = nn.Linear(2, 2).double()
    optimizer.add_param_group({"params": list(more.parameters())})
    assert set(optimizer._parameter_names) == {*wanted, *more.parameters()}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("adasum", [False, True], ids=["average", "adasum"])
@on_ranks()
def test_the_number_of_passes_is_where_horovod_has_it(adasum: bool) -> None:
    model = nn.Linear(3, 1, dtype=torch.float64)
    optimizer: Any = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), op=hvd.Adasum if adasum else hvd.Average
    )
    assert optimizer.backward_passes_per_step == 1
    for passes in (1, 2, 3):
        if passes == 2:
            optimizer.set_backward_passes_per_step(2)
        elif passes == 3:
            optimizer.backward_passes_per_step = 3
        assert optimizer.backward_passes_per_step == passes
        for _ in range(passes):  # a pass too many is an error
            model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
        assert optimizer.backward_passes_per_step == passes  # while the update is deferred, too
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        optimizer.backward_passes_per_step = 0


@pytest.mark.parametrize("closure", [False, True])
@on_ranks(2)
def test_sparse_adam_with_gradients_that_travel_dense(closure: bool) -> None:
    """Rows that both ranks, one rank or nobody looks up; gradients travel as dense ones."""
    results, deferred = [], []
    for distributed in (True, False):
        torch.manual_seed(2)
        table = nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
        optimizer: Any = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        if distributed:
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=table.named_parameters(), sparse_as_dense=True
            )
        for step in range(8):
            looked_up = [torch.tensor([rank, rank + step % 3, 7]) for rank in range(2)]

            def backward(
                looked_up: list[Tensor] = looked_up,
                table: nn.Embedding = table,
                optimizer: Any = optimizer,
                distributed: bool = distributed,
            ) -> Tensor:
                optimizer.zero_grad()
                for numbers in [looked_up[hvd.rank()]] if distributed else looked_up:
                    loss = table(numbers).square().sum()
                    (loss if distributed else loss / 2).backward()
                return loss

            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
            if distributed and step >= 3:
                deferred.append(optimizer.overlap_report().deferred_parameters)
        results.append({"table": table.weight.detach().clone()})
    seen = {"difference": largest_difference(*results), "deferred": set(deferred) == {1}}
    assert seen["difference"] <= TOLERANCE
    assert seen["deferred"] or closure
