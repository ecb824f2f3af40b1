"""Processes that a rank forks: they find finished parameters, wait for nothing, end no job."""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.flags import wait_until
from helpers.on_ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hvd_order.torch as hvd

CHILD_S = 20.0  # how long a child may take


def trained(steps: int = 5) -> tuple[nn.Module, Any]:
    """After these steps every update is deferred."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    train(model, optimizer, steps)
    assert type(model[0].weight) is not nn.Parameter
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 32), 0.1 * (1 + hvd.rank()))).square().mean().backward()
        optimizer.step()


def in_child(work: Callable[[], Any], end: Callable[[], Any] = lambda: os._exit(0)) -> Any:
    """What `work` returns in a forked child, or the text of its error.

    Args:
        end: ends the child.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, pickle.dumps(answer))
        os.close(writer)
        end()
    os.close(writer)
    killer = threading.Timer(CHILD_S, os.kill, (child, 9))
    killer.start()
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    killer.cancel()
    assert status == 0, f"the child hung or crashed: status {status}, it had told {len(data)} bytes"
    return pickle.loads(data)


def first_weights(model: nn.Module) -> list[float]:
    return model[0].weight.detach().flatten()[:8].tolist()  # type: ignore[index]


class _FromModel(Dataset[torch.Tensor]):
    """Items made with the model, as hard-example mining does."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return self._model(torch.full((32,), float(index)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@on_ranks(2)
def test_a_worker_of_a_data_loader_reads_finished_parameters(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model, optimizer = trained()
    about_to_fork = Path(folder, "about to fork")
    if hvd.rank() == 1:  # late, so that rank 0 forks while gradients are in flight
        wait_until(about_to_fork.exists, "rank 0 comes to its fork", CHILD_S)
    train(model, optimizer, 1)
    about_to_fork.touch()
    # The workers are forked here, with all updates deferred, and read parameters.
    loader = DataLoader(_FromModel(model), batch_size=1, num_workers=2, timeout=CHILD_S)
    seen = torch.cat(list(loader))
    with torch.no_grad():
        expected = torch.stack([model(torch.full((32,), float(i))) for i in range(4)])
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)
    train(model, optimizer, 3)
    optimizer.flush()


@on_ranks(2)
def test_a_fork_while_the_model_is_learnt_leaves_no_watch_behind() -> None:
    """Between the first and the second step parameters are armed, though nothing is deferred."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    kinds = in_child(lambda: {type(p).__name__ for p in model.parameters()})
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    assert kinds == {"Parameter"}


@on_ranks(2)
def test_a_gradient_in_flight_cannot_be_read_by_the_child() -> None:
    model, optimizer = trained()
    optimizer.zero_grad()
    model(torch.ones(2, 32)).square().mean().backward()
    message = in_child(lambda: model[0].weight.grad.norm().item())
    optimizer.step()
    optimizer.flush()
    assert message.startswith("InvalidUsage")
    assert "gradient of '0.weight'" in message
    assert f"forked from rank {hvd.rank()}" in message


@pytest.mark.parametrize("how", ["sys.exit", "shutdown"])
@on_ranks(2)
def test_the_end_of_a_child_is_not_the_end_of_the_job(how: str) -> None:
    train_around_a_child(how)


def train_around_a_child(how: str) -> None:
    model, optimizer = trained()
    ends: dict[str, Callable[[], Any]] = {
        "sys.exit": _finalize,
        "shutdown": lambda: (hvd.shutdown(), _finalize()),
    }
    assert in_child(lambda: hvd.size(), ends[how]) == 2
    train(model, optimizer, 3)
    optimizer.flush()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]


@on_ranks(2)
def test_the_end_of_a_child_when_other_jobs_have_ended_before() -> None:
    kept = []
    for _ in range(3):
        kept.append(trained())  # and with it what had carried its gradients
        hvd.shutdown()
        hvd.init()
    train_around_a_child("sys.exit")
    assert len(kept) == 3


def _finalize() -> None:
    """Ends the interpreter as the end of a program does, atexit and all objects included."""
    ctypes.pythonapi.Py_Exit(0)


@on_ranks(2)
def test_locks_that_other_threads_hold_are_free_in_the_child() -> None:
    """Forks while another thread reads parameters, and so takes the locks, all the time."""
    model, optimizer = trained()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            first_weights(model)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(10):
            train(model, optimizer, 1)
            assert len(in_child(lambda: first_weights(model))) == 8
    finally:
        stop.set()
        reader.join()
    optimizer.flush()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_the_optimizer_in_a_child_answers_or_names_the_fork(sharded: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        sharded=sharded,
    )
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    def backward() -> bool:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        return model.weight.grad is not None and bool(model.weight.grad.norm() > 0)

    def change() -> list[float]:
        with torch.no_grad():
            model.bias.fill_(7.0)
        return model.bias.tolist()

    uses = {
        "rank": lambda: (hvd.rank(), hvd.size()),
        "collective": lambda: hvd.allreduce(torch.ones(2)),
        **({} if sharded else {"backward": backward, "change": change}),
        "clip": lambda: optimizer.clip_grad_norm_(1.0),
        "add": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "step": optimizer.step,
        "report": lambda: str(optimizer.overlap_report()),
        "flush": optimizer.flush,
        "state": lambda: sorted(optimizer.state_dict()["state"]),
        "pickle": lambda: pickle.loads(pickle.dumps(optimizer)).state_dict()["param_groups"],
        "zero": optimizer.zero_grad,
    }

    def use_all() -> dict[str, Any]:
        answers = {}
        for name, use in uses.items():
            try:
                answers[name] = use()
            except Exception as error:
                answers[name] = f"{type(error).__name__}: {error}"
        return answers

    report = str(optimizer.overlap_report())
    answers = in_child(use_all)
    assert 7.0 not in model.bias.tolist()
    assert answers["rank"] == (hvd.rank(), 2)
    assert "InvalidUsage: a collective operation in process" in answers["collective"]
    assert "InvalidUsage: optimizer.step() in process" in answers["step"]
    refused = ["collective", "clip", "add", "step"] + ["state", "pickle"] * sharded
    for name in refused:
        assert answers[name].startswith("InvalidUsage: "), answers
        assert f"forked from rank {hvd.rank()}" in answers[name], answers
    assert answers["report"] == report
    assert answers["flush"] is answers["zero"] is None
    if not sharded:
        assert answers["backward"] is True
        assert answers["change"] == [7.0] * 4
        assert answers["state"] == [0, 1]
        assert answers["pickle"][0]["momentum"] == 0.9
    train_on = model(torch.ones(2, 4)).sum()
    train_on.backward()
    optimizer.step()
