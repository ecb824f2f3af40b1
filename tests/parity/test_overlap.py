"""Which updates are deferred: all that may be, whoever reads the parameters, and who says so."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.logged import logged
from helpers.on_ranks import on_ranks
from helpers.ranks import run_script
from torch import Tensor, nn

import hvd_order.torch as hvd

WIDTH = 6


def rows(step: int) -> Tensor:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(2 * 4, WIDTH, generator=numbers, dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, steps: int, wrap: bool = True, **how: Any) -> Any:
    """Trains on this rank's half of the rows, or on all of them, and returns the optimizer."""
    optimizer = sgd(model)
    mine = slice(None)
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **how)
        mine = slice(hvd.rank(), None, hvd.size())
    for step in range(steps):
        optimizer.zero_grad()
        model(rows(step)[mine]).square().mean().backward()
        optimizer.step()
    return optimizer


def same_as_one_process(make: Callable[[], nn.Module], steps: int) -> Any:
    """Trains a model on all ranks and alone; returns the optimizer after the last step."""
    ours, alone = make(), make()
    optimizer = train(ours, steps)
    train(alone, steps, wrap=False)
    report = optimizer.overlap_report()
    for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-12, atol=1e-14), name
    return report


# ---- readers that Python does not see ---------------------------------------------------------


class Kernel(torch.autograd.Function):
    """Hands its tensors to code that does not look at their class, as extensions in C++ do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            return gradients[0] @ weight, gradients[0].t() @ x


class HiddenLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Kernel.apply(x, self.weight))  # type: ignore[no-untyped-call]


def hidden_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[HiddenLinear() for _ in range(4)], nn.Linear(WIDTH, 2).double())


class ReadsItsChildren(nn.Module):
    """A kernel of the parent reads the parameters of layers that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HiddenLinear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(Kernel.apply(x, layer.weight))  # type: ignore[no-untyped-call]
        return x


def parent_model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(ReadsItsChildren(), nn.Linear(WIDTH, 2).double())


@pytest.mark.parametrize("name", ["own", "parent's"])
@on_ranks(2)
def test_parameters_that_only_a_kernel_reads_are_deferred(name: str) -> None:
    report = same_as_one_process(hidden_model if name == "own" else parent_model, 10)
    assert report.deferred_parameters == report.parameters, str(report)


@on_ranks(2)
def test_a_kernel_outside_of_its_module_meets_the_lock() -> None:
    model = hidden_model()
    optimizer = train(model, 10)
    assert optimizer.overlap_report().deferred_parameters == 6
    with (
        pytest.raises(RuntimeError, match="StaleRead") as caught,
        torch._C.DisableTorchFunctionSubclass(),  # Function.apply() would ask, and be answered
    ):
        model[2].weight.clone()
    optimizer.flush()
    Kernel.apply(rows(0), model[2].weight)  # type: ignore[no-untyped-call]
    message = str(caught.value)
    assert "'2.weight'" in message
    assert "optimizer.flush()" in message


# ---- learning goes on -------------------------------------------------------------------------


class LayerDrop(nn.Module):
    """Skips layers, the same on all ranks, so that some do not run in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(5))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for i, layer in enumerate(self.layers):
            if i == 4 or self.calls > 4 or (i + self.calls) % 3 == 0:
                x = torch.tanh(layer(x))
        return x


def layer_drop() -> nn.Module:
    torch.manual_seed(5)
    return LayerDrop()


@on_ranks(2)
def test_layers_that_run_later_are_deferred_later() -> None:
    assert "all 10 parameters" in str(same_as_one_process(layer_drop, 18))


@on_ranks(2)
def test_a_misleading_first_step_does_not_fix_the_order() -> None:
    """A look at the last layer after each of the first steps; then no more."""
    torch.manual_seed(6)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH).double() for _ in range(4)])
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    for step in range(9):
        if step < 3:
            _ = model[3].weight.norm()
        optimizer.zero_grad()
        model(rows(step)[hvd.rank() :: 2]).square().mean().backward()
        optimizer.step()
    entries = optimizer._hvd_exchange._table.entries  # type: ignore[attr-defined]
    order = [entry.name for entry in sorted(entries, key=lambda entry: entry.tensor)]
    assert order == [f"{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]


# ---- closures and subclasses ------------------------------------------------------------------


def with_closures(wrap: bool) -> tuple[Tensor, Any]:
    torch.manual_seed(7)
    model = nn.Linear(WIDTH, 2).double()
    optimizer: Any = sgd(model)
    mine = slice(None)
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        mine = slice(hvd.rank(), None, 2)
    for step in range(8):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(rows(step)[mine]).square().mean()
            loss.backward()
            return loss

        with torch.no_grad():
            loss = optimizer.step(closure)
        assert loss.shape == ()
    report = optimizer.overlap_report() if wrap else None
    return model.weight.detach().clone(), report


@on_ranks(2)
def test_closures_keep_the_overlap() -> None:
    (ours, report), (alone, _) = with_closures(True), with_closures(False)
    assert report.deferred_parameters == 2, str(report)
    torch.testing.assert_close(ours, alone, rtol=1e-12, atol=0)


# ---- one line says why ------------------------------------------------------------------------


@on_ranks(2)
def test_one_line_says_what_is_not_deferred_and_why() -> None:
    lines = {}
    for name in ("alias", "numpy", "script", "from_numpy", "looked at"):
        torch.manual_seed(9)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH).double() for _ in range(3)])
        if name == "from_numpy":
            model[1].weight = nn.Parameter(torch.from_numpy(model[1].weight.detach().numpy()))
        kept: Any = {
            "alias": lambda model=model: model[1].weight.data,
            "numpy": lambda model=model: model[1].weight.detach().numpy(),
            "script": lambda model=model: torch.jit.script(model[1]),
        }.get(name, lambda: None)()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        with logged(level=logging.WARNING) as warnings:
            for step in range(7):
                optimizer.zero_grad()
                model(rows(step)[hvd.rank() :: 2]).square().mean().backward()
                if name == "looked at":
                    gradients = [p.grad for p in model.parameters() if p.grad is not None]
                    assert all(gradient.isfinite().all() for gradient in gradients)
                optimizer.step()
        told = [text for text in warnings if "overlap with the next forward pass" in text]
        assert len(told) == (1 if hvd.rank() == 0 else 0)
        lines[name] = str(optimizer.overlap_report())
        del kept
    assert "5 of 6 parameters" in lines["alias"]
    assert "p.data in a variable, a numpy view" in lines["alias"]
    assert "a numpy view" in lines["numpy"]
    assert "4 of 6" in lines["script"]
    assert "TorchScript" in lines["script"]
    assert "from_numpy" in lines["from_numpy"]
    assert "0 of 6" in lines["looked at"]
    assert "elements of gradients were read" in lines["looked at"]


# ---- nothing is left behind -------------------------------------------------------------------


@pytest.mark.parametrize("finished", [True, False])
@on_ranks(2)
def test_a_dropped_optimizer_leaves_nothing(finished: bool) -> None:
    gone: dict[str, weakref.ref[Any]] = {}
    torch.manual_seed(10)
    for i in range(3):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH).double() for _ in range(3)])
        optimizer = train(model, 6)
        if finished:
            optimizer.flush()
        gone[f"model {i}"] = weakref.ref(model)
        gone[f"optimizer {i}"] = weakref.ref(optimizer)
        gone[f"weight {i}"] = weakref.ref(model[0].weight)
        gone[f"buffers {i}"] = weakref.ref(optimizer._hvd_exchange._model._buffers)
        del model, optimizer
    for _ in range(2 * len(gone)):  # what has a finalizer takes a collection of its own
        gc.collect()
    assert [name for name, ref in gone.items() if ref() is not None] == []


@on_ranks(2)
def test_no_graph_is_kept_while_reads_are_watched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()
    optimizer = train(model, 6)  # reads are watched after steps 6 and 7
    x = rows(0).requires_grad_()
    is_freed = weakref.ref(x)
    model(x).sum()
    del x
    gc.collect()
    optimizer.flush()
    assert is_freed() is None


COMPILED = """
import torch
import hvd_order.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
compiled = torch.compile(model, backend="eager")
for step in range(9):
    optimizer.zero_grad()
    compiled(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


def test_a_compiled_model_says_nothing_of_hooks_that_are_ours() -> None:
    for end in run_script(2, COMPILED):
        assert end.returncode == 0, end.stderr
        assert "Warning" not in end.stderr
