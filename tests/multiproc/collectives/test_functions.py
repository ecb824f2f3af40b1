"""Parameters, optimizer state and objects: equal everywhere; training goes on as on the root."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.jobs import refused
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.collectives import functions

SIZES = [1, 3]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adam_tensor_lr": (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "lbfgs": (torch.optim.LBFGS, {"history_size": 3, "max_iter": 4}),
}


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
    ).double()


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    options = copy.deepcopy(options)
    return kind(parameters if name == "lbfgs" else groups, **options)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    """Ordinary steps in one process."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randn(8, 5, generator=generator, dtype=torch.float64)

        def closure(batch: torch.Tensor = batch) -> float:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return float(loss)

        optimizer.step(closure)  # type: ignore[arg-type]


def assert_same_everywhere(value: Any) -> None:
    """Bitwise: dtypes, shapes and bytes."""
    for other in hvd.allgather_object(value):
        torch.testing.assert_close(other, value, rtol=0, atol=0)


# ---- parameters ----


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_broadcast_parameters() -> None:
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    wanted = make_model(seed=root).state_dict()

    model = make_model(seed=rank)
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    torch.testing.assert_close(model.state_dict(), wanted, rtol=0, atol=0)

    model = make_model(seed=rank)
    hvd.broadcast_parameters(list(model.named_parameters()), root)
    hvd.broadcast_parameters(model.buffers(), root)
    torch.testing.assert_close(model.state_dict(), wanted, rtol=0, atol=0)
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_all_kinds_of_tensors_in_several_chunks() -> None:
    tensors = {
        "half": torch.full((3,), hvd.rank() + 1, dtype=torch.bfloat16),
        "scalar": torch.tensor(hvd.rank() + 1),
        "empty": torch.empty(0, 3),
        "flag": torch.tensor([hvd.rank() == 0]),
        "transposed": (torch.arange(6.0).reshape(2, 3) + hvd.rank()).t(),
        "expanded_from_a_view": torch.arange(10.0)[::3] + hvd.rank(),
        "complex": torch.tensor([1j * (hvd.rank() + 1)]),
        "big": torch.full((5000,), float(hvd.rank())),
        "also_big": torch.full((5001,), float(hvd.rank())),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "_FUSED_BYTES", 20_000)  # several chunks, one tensor above it
        hvd.broadcast_parameters(tensors, root_rank=0)
    assert tensors["half"].tolist() == [1.0] * 3
    assert tensors["scalar"].item() == 1
    assert tensors["flag"].item() is True
    assert torch.equal(tensors["transposed"], torch.arange(6.0).reshape(2, 3).t())
    assert tensors["expanded_from_a_view"].tolist() == [0.0, 3.0, 6.0, 9.0]
    assert tensors["complex"].item() == 1j
    assert not tensors["big"].any()
    assert not tensors["also_big"].any()
    hvd.broadcast_parameters({}, root_rank=0)


def body_parameters_mismatch() -> str:
    params = {"a": torch.ones(2), "b.weight": torch.ones(4 if hvd.rank() == 1 else 3)}
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.broadcast_parameters(params, root_rank=0)
    assert hvd.allreduce(torch.ones(1)).item() == 1.0
    return f"{caught.type.__name__}: {caught.value}"


def test_models_that_differ_are_named_on_every_rank(ranks: RankFactory) -> None:
    messages = ranks(3).run(body_parameters_mismatch)
    assert messages == [messages[0]] * 3
    assert messages[0].startswith("ModelMismatch: ranks disagree in broadcast_parameters")
    words = "b.weight torch.float32 [3] on cpu; rank 1: b.weight torch.float32 [4]"
    assert words in messages[0]


@on_ranks(2)
def test_wrong_parameters() -> None:
    with pytest.raises(ValueError, match="invalid params of type"):
        hvd.broadcast_parameters(3, root_rank=0)  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="'epoch' is of type int, not a tensor"):
        hvd.broadcast_parameters({"epoch": 3}, root_rank=0)
    with pytest.raises(InvalidUsage, match="only dense tensors"):
        hvd.broadcast_parameters({"s": torch.ones(2).to_sparse()}, root_rank=0)
    with pytest.raises(InvalidUsage, match="root_rank is -1"):
        hvd.broadcast_parameters({}, root_rank=-1)


# ---- optimizer state ----


def body_optimizer_state(name: str, steps_before: int) -> None:
    """The root has trained, the others have done something else; then all go on together."""
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    model = make_model(seed=rank)
    optimizer = make_optimizer(name, model)
    if rank == root:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
    train(model, optimizer, steps=steps_before if rank == root else rank + 1, seed=rank)
    groups = optimizer.param_groups
    first_group = groups[0]

    alone = make_model(seed=root)  # what one process does
    alone_optimizer = make_optimizer(name, alone)
    for group in alone_optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    train(alone, alone_optimizer, steps=steps_before, seed=root)

    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    wanted = alone_optimizer.state_dict()
    torch.testing.assert_close(optimizer.state_dict(), wanted, rtol=0, atol=0)
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is first_group

    train(model, optimizer, steps=3, seed=99)
    train(alone, alone_optimizer, steps=3, seed=99)
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), alone_optimizer.state_dict(), rtol=0, atol=0)
    assert_same_everywhere(optimizer.state_dict()["param_groups"])


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("steps_before", [0, 3])
def test_training_goes_on_as_on_the_root(ranks: RankFactory, name: str, steps_before: int) -> None:
    # With steps_before=0 the root has no state, so nobody may have any afterwards, and Adam's
    # step counter starts at 0: no hidden step.
    for size in SIZES:
        ranks(size).run(body_optimizer_state, name, steps_before)


@on_ranks(2)
def test_state_of_another_dtype() -> None:
    """State of another dtype than its parameter arrives as it is on the root."""
    model = make_model(seed=0).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.randn(parameter.shape)
            optimizer.state[parameter]["note"] = ["x", (1, None)]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for parameter in model.parameters():
        assert optimizer.state[parameter]["momentum_buffer"].dtype is torch.float32
        assert optimizer.state[parameter].pop("note") == ["x", (1, None)]
    assert_same_everywhere(optimizer.state_dict())


@on_ranks(2)
def test_sparse_adam_and_a_scheduler() -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if hvd.rank() == 0:
        embedding(torch.tensor([1, 3])).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=embedding)
    assert optimizer.state_dict()["state"][0]["step"] == 1
    assert_same_everywhere(optimizer.state_dict())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.005, "the scheduler still reaches the groups"


def body_other_optimizer() -> str:
    model = make_model(seed=0)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[:-1] if hvd.rank() == 1 else parameters, lr=0.1)
    return refused(
        lambda: hvd.broadcast_optimizer_state(optimizer, root_rank=0), hvd.HorovodInternalError
    )


def test_optimizers_that_differ(ranks: RankFactory) -> None:
    messages = ranks(2).run(body_other_optimizer)
    assert messages[0] == messages[1]
    assert "rank 0: group 0 with 6 parameters; rank 1: group 0 with 5 parameters" in messages[0]


# ---- objects ----


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = {"rank": rank, "payload": "x" * (rank * 100_000), "tensor": torch.full((3,), rank)}
    for root in range(size):
        got = hvd.broadcast_object(mine, root_rank=root)
        assert (got["rank"], len(got["payload"])) == (root, root * 100_000)
        assert got["tensor"].tolist() == [root] * 3
        assert (got is mine) == (rank == root)
    assert hvd.broadcast_object(None) is None
    assert hvd.broadcast_object([] if rank == 0 else "ignored", name="list") == []
    everyone = hvd.allgather_object((rank, "y" * rank))
    assert everyone == [(other, "y" * other) for other in range(size)]
    assert hvd.allgather_object(None) == [None] * size


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("cannot be moved")


def body_unpicklable() -> list[str]:
    messages = []
    for call in (
        lambda: hvd.broadcast_object(Unpicklable(), root_rank=1),
        lambda: hvd.allgather_object(Unpicklable() if hvd.rank() == 1 else 3),
    ):
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_pickled_is_an_error_on_every_rank(ranks: RankFactory) -> None:
    text = "the object of rank 1 cannot be pickled: TypeError: cannot be moved"
    assert ranks(3).run(body_unpicklable) == [[text, text]] * 3
