"""Two threads of a rank train a model each, and no two ranks run them in the same order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.jobs import new_job, refused
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory, RankPool
from torch import nn

import hvd_order.torch as hvd
from hvd_order.base.link.slice_settings import SliceSettings
from hvd_order.engine.engine_host import engine_host
from hvd_order.torch.gradients import tuning

KIB = 1024
STEPS = 12
Weights = list[list[torch.Tensor]]


def model(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "sparse":
        return nn.Sequential(nn.Embedding(8, 6, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def rows(kind: str, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    if kind == "sparse":
        return torch.randint(8, (12, 2), generator=generator)
    return torch.randn(12, 6, generator=generator)


def optimizer_of(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    if kind == "closure":
        return torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.0 if kind == "sparse" else 0.9)


def train(
    net: nn.Module,
    optimizer: Any,
    which: int,
    kind: str,
    mine: Callable[[torch.Tensor], torch.Tensor],
    began: Callable[[], object] = lambda: None,
    stepped: Callable[[int], object] = lambda _: None,
) -> None:
    """Trains on the rows of one of the two; `began` is called within the first step."""
    for step in range(STEPS):

        def loss(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(mine(rows(kind, step + 50 * which))).square().mean()
            loss.backward()
            began()
            return loss

        if kind == "closure":
            optimizer.step(loss)
        else:
            loss()
            if kind == "clip" and which == 0:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        stepped(step)


def weights_of(nets: list[nn.Module]) -> Weights:
    return [[p.detach().clone() for p in net.parameters()] for net in nets]


def alone(kind: str) -> Weights:
    """Both models, one after the other, in one process."""
    with double():
        nets = [model(kind), model(kind)]
        for which, net in enumerate(nets):
            train(net, optimizer_of(kind, net), which, kind, lambda x: x)
        return weights_of(nets)


@contextlib.contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def my_rows(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(hvd.size())[hvd.rank()]


class Threads:
    """One thread for each model; an exception in one of them is raised by `join`."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(work, i)) for i in range(2)]

    def _run(self, work: Callable[[int], None], which: int) -> None:
        try:
            work(which)
        except BaseException as error:
            self._errors.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


def distributed(net: nn.Module, kind: str, prefix: str) -> Any:
    return hvd.DistributedOptimizer(
        optimizer_of(kind, net),
        named_parameters=[(prefix + name, p) for name, p in net.named_parameters()],
    )


def body_opposite(kind: str, made: str) -> Weights:
    """Even ranks begin with the first model, odd ones with the second.

    Args:
        kind: what the models are and do.
        made: where the optimizers are made, and with what names.
    """
    with double():
        nets = [model(kind), model(kind)]
        optimizers: list[Any] = [None, None]
        prefixes = ["", ""] if made == "before, same names" else ["a.", "b."]
        if made != "in the threads":
            optimizers = [distributed(nets[i], kind, prefixes[i]) for i in range(2)]
        first = hvd.rank() % 2
        begun = threading.Event()

        def work(which: int) -> None:
            if which != first:
                assert begun.wait(60)
            elif made == "in the threads":
                begun.set()
            if optimizers[which] is None:
                optimizers[which] = distributed(nets[which], kind, prefixes[which])
            train(nets[which], optimizers[which], which, kind, my_rows, begun.set, together(which))

        Threads(work).join()
        for optimizer in optimizers:
            optimizer.flush()
        return weights_of(nets)


def together(which: int) -> Callable[[int], None]:
    """A collective by name after each step, as an average of losses is."""

    def after(step: int) -> None:
        total = hvd.allreduce(torch.tensor(1.0 + which), name=f"loss {which} {step}", op=hvd.Sum)
        assert total.item() == hvd.size() * (1 + which)

    return after


@pytest.mark.parametrize(
    ("made", "size"), [("before", 2), ("before, same names", 3), ("in the threads", 3)]
)
def test_threads_in_opposite_order_train_what_one_process_trains(
    ranks: RankFactory, made: str, size: int
) -> None:
    kinds = ["clip", "sparse", "closure"] if made == "before" else ["clip"]
    for kind in kinds:
        expected = alone(kind)
        for weights in ranks(size).run(body_opposite, kind, made):
            torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


PLANNED = SliceSettings(64 * KIB, 128 * KIB, agreement="planned")


def body_late(only: SliceSettings) -> tuple[Weights, str]:
    """The second model comes while the first one follows a plan, at other steps on each rank."""
    with pytest.MonkeyPatch.context() as patch, double(), new_job({}):
        patch.setattr(
            tuning, "candidates", lambda own, _, planned, __: [only] if planned else [own]
        )
        nets = [model(""), model("")]
        optimizers: list[Any] = [distributed(nets[0], "", "a."), None]
        due = threading.Event()

        def stepped(step: int) -> None:
            if step == 4 + hvd.rank():
                due.set()

        def work(which: int) -> None:
            if which == 1:
                assert due.wait(60)
                optimizers[1] = distributed(nets[1], "", "b.")
            train(nets[which], optimizers[which], which, "", my_rows, stepped=stepped)

        Threads(work).join()
        for optimizer in optimizers:
            optimizer.flush()
        return weights_of(nets), engine_host().agreement


def test_a_second_thread_ends_the_plan_of_the_first(two_ranks: RankPool) -> None:
    expected = alone("")
    for weights, agreement in two_ranks.run(body_late, PLANNED):
        assert agreement == "leader"
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_threads_whose_models_nothing_distinguishes_are_refused() -> None:
    """Two threads make optimizers whose parameters have the same names."""
    optimizers: list[Any] = []
    texts: list[str] = []
    made = threading.Event()
    done = threading.Event()

    def work(which: int) -> None:
        net = model("")
        if which == 1:
            assert made.wait(60)
            texts.append(refused(lambda: distributed(net, "", "")))
            done.set()
        else:
            optimizers.append(distributed(net, "", ""))
            made.set()
            assert done.wait(60)

    Threads(work).join()
    assert len(texts) == 1
    assert "named_parameters=" in texts[0]


@on_ranks(2)
def test_nothing_is_measured_while_another_thread_trains() -> None:
    """An optimizer that needs a measurement is made while another thread may send gradients."""
    with new_job({}):
        text = make_sharded_late()
    assert "before that thread begins" in text


def make_sharded_late() -> str:
    nets = [model(""), model("")]
    optimizer = distributed(nets[0], "", "a.")
    stepped, tried = threading.Event(), threading.Event()

    def work() -> None:
        optimizer.zero_grad()
        nets[0](my_rows(rows("", 0).float())).square().mean().backward()
        optimizer.step()
        stepped.set()
        assert tried.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert stepped.wait(60)
    inner = torch.optim.SGD(nets[1].parameters(), lr=0.1)
    text = refused(lambda: hvd.DistributedOptimizer(inner, sharded=True))
    tried.set()
    thread.join()
    return text
