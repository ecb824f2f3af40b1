"""Whether updates may be put off: what is known, what is held, what a trial shows."""

from __future__ import annotations

import copy
import functools
import logging
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.updates import optimizer_class, partial_step, separability
from hvd_order.torch.updates.separability import Separability


def parameters(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 3)) for _ in range(count)]


def verdict(optimizer: Optimizer, declared: bool | None = None) -> Separability:
    return separability.separability(optimizer, type(optimizer), declared)


# ---- known classes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop",
        "Rprop", "ASGD", "SparseAdam", "Adafactor", "Muon",
    ],
)  # fmt: skip
def test_torch_has_been_read(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    found = verdict(getattr(torch.optim, name)(parameters(), lr=0.1))
    assert found.separable, found.reason
    assert found.evaluates_closure_once


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_low_and_high_precision(dtype: torch.dtype) -> None:
    made = [p.to(dtype) for p in parameters()]
    assert verdict(torch.optim.AdamW([nn.Parameter(p.detach()) for p in made])).separable


def test_groups_with_options_of_their_own() -> None:
    groups = [{"params": parameters(), "weight_decay": 0.1}, {"params": parameters(), "lr": 0.3}]
    assert verdict(SGD(groups, lr=0.1, momentum=0.9)).separable


def test_lbfgs_looks_across() -> None:
    found = verdict(torch.optim.LBFGS(parameters()))
    assert not found.separable
    assert not found.evaluates_closure_once
    assert "across all parameters" in found.reason


def test_an_update_in_the_graph_is_not_put_off() -> None:
    assert "differentiable" in verdict(Adam(parameters(), differentiable=True)).reason


def test_adafactor_with_two_dtypes_in_a_group_is_not_put_off() -> None:
    one, other = parameters()
    both = [one, nn.Parameter(other.detach().double())]
    assert "eps" in verdict(torch.optim.Adafactor(both)).reason
    assert verdict(torch.optim.Adafactor(both, eps=(1e-8, 1e-3))).separable
    assert verdict(torch.optim.Adafactor([{"params": [p]} for p in both])).separable


def test_a_subclass_is_not_known() -> None:
    found = verdict(type("Mine", (SGD,), {})(parameters(), lr=0.1))
    assert not found.separable
    assert not found.expected
    assert "separable=True" in found.reason


def test_a_class_of_the_same_name_is_not_known() -> None:
    same = type("SGD", (SGD,), {"__module__": SGD.__module__})
    assert not verdict(same(parameters(), lr=0.1)).separable


@pytest.fixture
def sgd_class() -> Iterator[type[SGD]]:
    before = SGD.step, SGD._init_group
    yield SGD
    SGD.step, SGD._init_group = before  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["step", "_init_group"])
def test_a_patched_class_is_not_known_any_more(sgd_class: type[SGD], name: str) -> None:
    theirs = getattr(sgd_class, name)

    @functools.wraps(theirs)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return theirs(*args, **kwargs)

    setattr(sgd_class, name, patched)
    found = verdict(SGD(parameters(), lr=0.1))
    assert not found.separable
    assert f"SGD.{name} has been replaced" in found.reason


def test_a_patched_object_is_not_known() -> None:
    optimizer: Any = SGD(parameters(), lr=0.1)
    optimizer._init_group = functools.partial(SGD._init_group, optimizer)
    assert "_init_group on the object" in verdict(optimizer).reason


def test_schedulers_and_the_compiler_may_wrap() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # wraps what optimizers have
    for kind in (SGD, Adam, torch.optim.RMSprop, torch.optim.SparseAdam):
        optimizer = kind(parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert verdict(optimizer).separable


def test_what_was_under_a_scheduler_is_never_dropped() -> None:
    calls = []

    @functools.wraps(SGD.step)
    def mine(self: SGD, closure: Any = None) -> Any:
        calls.append(1)
        return SGD.step(self, closure)

    optimizer: Any = SGD(parameters(), lr=0.1)
    optimizer.step = types.MethodType(mine, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step on the object" in verdict(optimizer).reason
    with pytest.raises(InvalidUsage, match=r"replaced optimizer\.step"):
        optimizer_class.give_methods(optimizer, Plain)


def test_step_hooks_are_taken_off_under_a_wrapper_that_copies_their_mark() -> None:
    class Mine(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    Mine(parameters(), lr=0.1)
    hooked: Any = Mine.step

    @functools.wraps(hooked)  # as torch.compile's: the mark comes along
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hooked(*args, **kwargs)

    Mine.step = wrapper  # type: ignore[method-assign]
    assert partial_step.inner_step(Mine) is hooked.__wrapped__


def test_what_else_hangs_on_a_known_optimizer_does_not_matter() -> None:
    optimizer: Any = SGD(parameters(), lr=0.1)
    optimizer.model = nn.Linear(3, 3)
    optimizer.first = optimizer.param_groups[0]["params"][0]
    optimizer.history = [1, 2, 3]
    assert verdict(optimizer).separable


# ---- other optimizers -------------------------------------------------------------------------


class Box:
    def __init__(self, content: object) -> None:
        self.content = content


class Slotted:
    __slots__ = ("content",)

    def __init__(self, content: object) -> None:
        self.content = content


HOLDERS: dict[str, Callable[[Optimizer], Any]] = {
    "attribute": lambda other: other,
    "list": lambda other: [[other]],
    "dict": lambda other: {"a": {"b": other}},
    "key": lambda other: {other: 1},
    "object": Box,
    "slots": Slotted,
    "bound method": lambda other: other.zero_grad,
    "partial": lambda other: functools.partial(print, other),
    "closure": lambda other: lambda: other.zero_grad(),
    "default": lambda other: lambda it=other: it,
    "weak reference": weakref.ref,
}


@pytest.mark.parametrize("how", HOLDERS)
@pytest.mark.parametrize("declared", [None, True])
def test_who_holds_another_is_never_deferred(how: str, declared: bool | None) -> None:
    other = Adam(parameters(), lr=0.1)
    optimizer: Any = SGD(parameters(), lr=0.1)
    optimizer.it = HOLDERS[how](other)
    found = verdict(optimizer, declared)
    assert not found.separable
    assert "another optimizer, of class Adam (attribute 'it'" in found.reason


_somewhere: list[Optimizer] = []


class Global(Optimizer):
    """Its step finds another optimizer in a global list."""

    hvd_order_separable = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        return _somewhere[0].step(closure)


def test_an_optimizer_among_the_globals_of_step_is_found() -> None:
    inner = SGD(parameters(), lr=0.1)
    _somewhere[:] = [inner]
    try:
        assert "global '_somewhere'" in verdict(Global(parameters())).reason
    finally:
        _somewhere.clear()


@pytest.mark.parametrize("name", ["param_groups", "state"])
@pytest.mark.parametrize("declared", [None, True])
def test_who_shares_with_another_is_never_deferred(name: str, declared: bool | None) -> None:
    other, optimizer = SGD(parameters(), lr=0.1), SGD(parameters(), lr=0.1)
    setattr(optimizer, name, getattr(other, name))
    assert f"shares {name}" in verdict(optimizer, declared).reason


def test_holding_its_own_groups_elsewhere_is_no_sharing() -> None:
    optimizer = SGD(parameters(), lr=0.1)
    groups, state = optimizer.param_groups, optimizer.state
    assert verdict(optimizer).separable
    assert groups is optimizer.param_groups
    assert state is optimizer.state


class Facade(Optimizer):
    """Has nothing of its own."""

    groups: Any

    def __init__(self, params: Any) -> None:
        Facade.groups = [{"params": list(params)}]
        self.defaults: dict[str, Any] = {}

    param_groups = property(lambda self: self.groups)  # type: ignore[assignment]
    state = property(lambda self: {})  # type: ignore[assignment]


def test_groups_that_are_somebody_elses() -> None:
    assert "from something else" in verdict(Facade(parameters()), declared=True).reason


# ---- what a declaration cannot make good ------------------------------------------------------


class Plain(Optimizer):
    """Right as it is; subclasses are not."""

    hvd_order_separable = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def each(self) -> Iterator[tuple[nn.Parameter, float]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield p, group["lr"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, lr in self.each():
            p -= lr * p.grad


class KeepsList(Plain):
    hvd_order_separable = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all = [p for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.all:
            p -= 0.1 * p.grad


class KeepsView(KeepsList):
    hvd_order_separable = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all = [p.detach().view(-1) for p in self.all]  # type: ignore[misc]


def before(act: Callable[[Any], object]) -> type[Plain]:
    """A class that does something before each step."""

    class Mine(Plain):
        hvd_order_separable = True
        count = 0

        def step(self, closure: Any = None) -> None:
            act(self)
            super().step()

    return Mine


def count_in_group(optimizer: Plain) -> None:
    group = optimizer.param_groups[0]
    group["count"] = group.get("count", 0) + 1


def count_in_attribute(optimizer: Any) -> None:
    optimizer.count += 1


def count_in_state(optimizer: Plain) -> None:
    counter: Any = optimizer.state["all"]  # type: ignore[index]
    counter["steps"] = counter.get("steps", 0) + 1


def clip(optimizer: Plain) -> None:
    nn.utils.clip_grad_norm_([p for p, _ in optimizer.each()], 1e9)


def complain(optimizer: Plain) -> None:
    raise RuntimeError("no toys, please")


class CountsInClosure(Plain):
    hvd_order_separable = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        counter = [0]

        def count() -> None:
            counter[0] += 1

        self.count = count

    def step(self, closure: Any = None) -> None:
        self.count()
        super().step()


class HasGenerator(Plain):
    hvd_order_separable = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.numbers = torch.Generator()


class Skips(Plain):
    hvd_order_separable = True

    def step(self, closure: Any = None) -> None:
        if all(p.grad.isfinite().all() for p, _ in self.each() if p.grad is not None):
            super().step()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (KeepsList, "outside of its groups (attribute 'all'"),
        (KeepsView, "outside of its groups (attribute 'all'"),
        (before(count_in_group), "writes into its parameter groups"),
        (before(count_in_attribute), "attribute 'count' changed with every part"),
        (before(count_in_state), "state that belongs to no parameter"),
        (CountsInClosure, "a function of it keeps a list"),
        (before(lambda _: torch.rand(1)), "random numbers"),
        (before(lambda _: random.random()), "random numbers"),
        (HasGenerator, "random generator (attribute 'numbers')"),
        (before(clip), "other weights than all at once"),
        (Skips, "other weights than all at once"),
        (before(complain), "no toys, please"),
    ],
)
def test_a_declaration_that_is_wrong(kind: type[Plain], said: str) -> None:
    made = parameters()
    for p in made:
        p.grad = torch.ones_like(p)
    optimizer = kind(made)
    numbers, python_numbers = torch.get_rng_state(), random.getstate()
    before = copy.deepcopy([[p.detach() for p in made], optimizer.state_dict(), optimizer.defaults])
    found = verdict(optimizer)
    assert not found.separable
    assert not found.expected
    assert said in found.reason
    # It has only been looked at.
    after = [[p.detach() for p in made], optimizer.state_dict(), optimizer.defaults]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not optimizer.state
    assert vars(optimizer).get("count", 0) == 0 or callable(vars(optimizer)["count"])
    assert torch.equal(torch.get_rng_state(), numbers)
    assert random.getstate() == python_numbers


def test_a_declaration_that_is_right() -> None:
    found = verdict(Plain(parameters()))
    assert found.separable
    assert not found.evaluates_closure_once  # nobody has said how often


def test_a_flag_that_is_set_once_is_no_counter() -> None:
    class Flag(Plain):
        hvd_order_separable = True
        begun = False

        def step(self, closure: Any = None) -> None:
            self.begun = True
            super().step()

    assert verdict(Flag(parameters())).separable


# ---- what is said -----------------------------------------------------------------------------


def test_it_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separability, "_said", set())
    caplog.set_level(logging.INFO, "hvd_order")
    unknown = verdict(type("Mine", (SGD,), {})(parameters(), lr=0.1))
    asked_for = verdict(SGD(parameters(), lr=0.1), declared=False)
    for each in (unknown, unknown, asked_for, verdict(SGD(parameters(), lr=0.1))):
        separability.log_reason(each)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "separable=True" in caplog.messages[0]
    assert "\n" not in caplog.messages[0]
