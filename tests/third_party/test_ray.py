"""Training on a real Ray cluster on this machine; workers are Ray's own processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import REPOSITORY
from helpers.training.small_problem import alone, equal

from hvd_order.base.errors import InvalidUsage

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)

STEPS = 8
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    ray.init(
        num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture
def executor() -> Iterator[Callable[..., Any]]:
    from hvd_order.ray import RayExecutor

    made = []

    def make(**arguments: Any) -> RayExecutor:
        made.append(RayExecutor(RayExecutor.create_settings(), **arguments))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(steps: int) -> tuple[int, dict[str, torch.Tensor]]:
    from helpers.training.small_problem import batches, loss_of, new_model, weights_of

    import hvd_order.torch as hvd

    hvd.init()
    model = new_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    for rows, target in batches(steps, hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        loss_of(model(rows), target).backward()
        optimizer.step()
    found = hvd.rank(), dict(weights_of(model))
    hvd.shutdown()
    return found


def test_workers_train_as_one_process(executor: Callable[..., Any]) -> None:
    workers = executor(num_workers=2)
    workers.start()
    found = workers.run(train, args=[STEPS])
    assert [rank for rank, _ in found] == [0, 1]
    assert all(equal(weights, alone(sgd, STEPS)) for _, weights in found)
    # Again, in the same processes.
    assert [rank for rank, _ in workers.run(train, kwargs={"steps": 1})] == [0, 1]


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self) -> int:
        self.value += int(os.environ["RANK"]) + 1
        return self.value


def test_objects_of_the_workers_keep_their_state(executor: Callable[..., Any]) -> None:
    workers = executor(num_hosts=1, num_workers_per_host=2)
    workers.start(executable_cls=Counter, executable_args=[10], extra_env_vars={"MINE": "yes"})
    assert workers.execute(lambda counter: counter.add()) == [11, 12]
    assert workers.execute(lambda counter: counter.add()) == [12, 14]
    assert workers.execute_single(lambda counter: counter.value) == 12
    assert workers.run(lambda: os.environ["MINE"]) == ["yes", "yes"]
    with pytest.raises(InvalidUsage, match="workers run already"):
        workers.start()


def fail_on_rank_1() -> None:
    import hvd_order.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ArithmeticError("a mistake of rank 1")
    hvd.allreduce(torch.ones(1))


def test_the_error_of_a_rank_reaches_the_caller(executor: Callable[..., Any]) -> None:
    workers = executor(num_workers=2)
    workers.start()
    with pytest.raises(ArithmeticError, match="a mistake of rank 1"):
        workers.run(fail_on_rank_1)
    workers.start()
    assert [rank for rank, _ in workers.run(train, args=[1])] == [0, 1]


def test_too_many_workers_are_refused_with_what_there_is(executor: Callable[..., Any]) -> None:
    from hvd_order.base.errors import HorovodInternalError
    from hvd_order.ray import RayExecutor, Settings

    workers = RayExecutor(Settings(placement_group_timeout_s=1.0), num_workers=64)
    with pytest.raises(HorovodInternalError, match="no room for 64 times"):
        workers.start()


def train_elastically(folder: str, steps: int) -> tuple[int, int, dict[str, torch.Tensor]]:
    from helpers.training.small_problem import batches, loss_of, new_model, weights_of

    import hvd_order.torch as hvd

    hvd.init()
    model = new_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    first = Path(folder, "first")

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.step < steps:
            rows, target = batches(steps, hvd.rank(), hvd.size())[state.step]
            optimizer.zero_grad()
            loss_of(model(rows), target).backward()
            optimizer.step()
            state.step += 1
            state.commit()
            if state.step == 3 and hvd.rank() == 1 and not first.exists():
                first.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    state = hvd.elastic.TorchState(model, optimizer, step=0)
    loop(state)
    found = hvd.rank(), hvd.size(), dict(weights_of(model))
    hvd.shutdown()
    return found


def test_an_elastic_job_goes_on_from_its_commit(
    executor: Callable[..., Any], tmp_path: Path
) -> None:
    workers = executor(min_workers=2)
    workers.start()
    found = workers.run(train_elastically, args=[str(tmp_path), STEPS])
    assert (tmp_path / "first").exists()
    assert [(rank, size) for rank, size, _ in found] == [(0, 2), (1, 2)]
    assert all(equal(weights, alone(sgd, STEPS)) for _, _, weights in found)
