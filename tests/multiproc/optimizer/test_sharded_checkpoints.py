"""``sharded_state_dict()``: checkpoints in shards, through torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.jobs import SMALL, default_group, new_job, refused
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory, RankPool
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import hvd_order.torch as hvd

ROWS = 12  # divided by 2 and 3 ranks
SAVED, END = 4, 8  # steps
Whole = dict[str, dict[str, Any]]


class Network(nn.Module):
    """Layers whose shards have many forms.

    `convolution` is stored with its channels last; `last.bias` has fewer elements than 3 ranks, and
    `scale` no dimensions.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(5, 23, 3)
        self.middle = nn.Linear(23, 31)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(31, 2)
        self.to(dtype=dtype, memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convolution(x).relu().amax((2, 3))
        found: Tensor = self.last(self.scale * self.middle(hidden).relu())
        return found


def optimizer_of(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    """AdamW with two groups: biases without weight decay."""
    named = list(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if "bias" not in name]},
            {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
        ],
        lr=lr,
        weight_decay=0.01,
    )


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    return hvd.DistributedOptimizer(
        optimizer or optimizer_of(model), model.named_parameters(), sharded=True
    )


def train(model: nn.Module, optimizer: Any, first: int, end: int, ranks: int, rank: int) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, end):
        numbers = torch.Generator().manual_seed(step)
        x, y = (
            torch.randn(ROWS, 5, 6, 6, generator=numbers),
            torch.randn(ROWS, 2, generator=numbers),
        )
        optimizer.zero_grad()
        found = model(x[rank::ranks].to(dtype))
        nn.functional.mse_loss(found, y[rank::ranks].to(dtype)).backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whole_state(model: nn.Module, optimizer: Any) -> Whole:
    """A copy of the state of all ranks by names, as `state_dict` gathers it."""
    names = {id(p): name for name, p in model.named_parameters()}
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return {name: state[i] for i, name in enumerate(ordered) if i in state}


def assert_same(ours: Whole, theirs: Whole) -> None:
    """Equal in every bit, and of the same kind."""
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert values.keys() == theirs[name].keys()
        for key, value in values.items():
            assert value.dtype == theirs[name][key].dtype, (name, key)
            assert torch.equal(value, theirs[name][key]), (name, key)


def body_save(folder: str, dtype: str, env: dict[str, str]) -> tuple[Whole, Tensor]:
    """Trains and saves; goes on training."""
    with new_job(env), default_group(f"{folder}.group"):
        model = Network(getattr(torch, dtype))
        optimizer = sharded(model)
        train(model, optimizer, 0, SAVED, hvd.size(), hvd.rank())
        optimizer.param_groups[1]["lr"] = 0.005
        dcp.save(
            {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()},
            checkpoint_id=folder,
        )
        whole = whole_state(model, optimizer)
        train(model, optimizer, SAVED, END, hvd.size(), hvd.rank())
        return whole, weights(model)


def body_load(
    folder: str, dtype: str, before: int, partial: bool = False
) -> tuple[Whole, list[float], Tensor]:
    """Loads into a new optimizer, or after steps; trains on."""
    with new_job(SMALL), default_group(f"{folder}.group{hvd.size()}{before}"):
        model = Network(getattr(torch, dtype))
        optimizer = sharded(model, optimizer_of(model, lr=0.1))
        train(model, optimizer, 0, before, hvd.size(), hvd.rank())
        state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
        dcp.load(
            state,
            checkpoint_id=folder,
            planner=dcp.DefaultLoadPlanner(allow_partial_load=partial),
        )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        del state
        whole = whole_state(model, optimizer)
        rates = [group["lr"] for group in optimizer.param_groups]
        train(model, optimizer, SAVED, END, hvd.size(), hvd.rank())
        return whole, rates, weights(model)


def alone(dtype: str, steps: int = END) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Training in one process; its rates as in `body_save`."""
    model = Network(getattr(torch, dtype))
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, min(steps, SAVED), 1, 0)
    optimizer.param_groups[1]["lr"] = 0.005
    train(model, optimizer, SAVED, steps, 1, 0)
    return model, optimizer


# ---- between ranks and processes --------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "before"), [("float32", 0), ("bfloat16", 3)])
def test_another_number_of_ranks(
    ranks: RankFactory, tmp_path: Path, dtype: str, before: int
) -> None:
    """Saved on 3 ranks, loaded on 2 and on 1, into new optimizers and used ones."""
    folder = str(tmp_path / "saved")
    (saved, went_on), *others = ranks(3).run(body_save, folder, dtype, SMALL)
    for theirs, _ in others:
        assert_same(theirs, saved)
    for whole, rates, resumed in ranks(2).run(body_load, folder, dtype, before):
        assert_same(whole, saved)
        assert rates == [0.01, 0.005]
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 0, "atol": 0.1}
        torch.testing.assert_close(resumed, went_on, **tolerance)
    if dtype == "float32":
        torch.testing.assert_close(went_on, weights(alone(dtype)[0]), rtol=1e-5, atol=1e-6)
        whole, rates, resumed = ranks(1).run(body_load, folder, dtype, before)[0]
        assert_same(whole, saved)
        assert rates == [0.01, 0.005]
        torch.testing.assert_close(resumed, went_on, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_training_is_the_same_in_every_bit(
    two_ranks: RankPool, tmp_path: Path, dtype: str
) -> None:
    """With the sums of 2 ranks, which no order of additions changes."""
    folder = str(tmp_path / "saved")
    (_, went_on), _ = two_ranks.run(body_save, folder, dtype, SMALL)
    for _, _, resumed in two_ranks.run(body_load, folder, dtype, 0):
        assert torch.equal(resumed, went_on)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loads_into_an_ordinary_optimizer(
    three_ranks: RankPool, tmp_path: Path, dtype: str
) -> None:
    folder = str(tmp_path / "saved")
    (saved, _), *_ = three_ranks.run(body_save, folder, dtype, SMALL)
    model = Network(getattr(torch, dtype))
    optimizer = optimizer_of(model)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    written = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    keys = {f"optimizer.state.{name}.{key}" for name, its in saved.items() for key in its}
    assert keys == {key for key in written if key.startswith("optimizer.state.")}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for values in saved.values():
        assert (values.pop("master", None) is not None) == (dtype == "bfloat16")
        for key in ("exp_avg", "exp_avg_sq"):  # an ordinary optimizer has state in 16 bits
            values[key] = values[key].to(getattr(torch, dtype))
    assert_same(whole_state(model, optimizer), saved)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loads_from_an_ordinary_optimizer(
    three_ranks: RankPool, tmp_path: Path, dtype: str
) -> None:
    folder = str(tmp_path / "saved")
    model, optimizer = alone(dtype, SAVED)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    expected = whole_state(model, optimizer)
    train(model, optimizer, SAVED, END, 1, 0)
    # It has no master copies of 16-bit weights.
    for whole, rates, resumed in three_ranks.run(
        body_load, folder, dtype, 0, partial=dtype == "bfloat16"
    ):
        assert rates == [0.01, 0.005]
        for name, values in whole.items():
            if dtype == "bfloat16":
                assert values.pop("master").dtype == torch.float32
                for key in ("exp_avg", "exp_avg_sq"):
                    values[key] = values[key].bfloat16()
            assert values.keys() == expected[name].keys()
        assert_same(whole, expected)
        if dtype == "float32":
            torch.testing.assert_close(resumed, weights(model), rtol=1e-5, atol=1e-6)


# ---- what is written, and what it costs -------------------------------------------------------


def test_each_rank_writes_its_shards(three_ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    (saved, _), *_ = three_ranks.run(body_save, str(folder), "float32", SMALL)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    elements = {0: 0, 1: 0, 2: 0}
    for index, stored in metadata.storage_data.items():
        if ".exp_avg" not in index.fqn:
            continue
        (chunk,) = [
            chunk
            for chunk in metadata.state_dict_metadata[index.fqn].chunks
            if chunk.offsets == index.offset
        ]
        elements[int(stored.relative_path.split("_")[2])] += math.prod(chunk.sizes)
    total = sum(value.numel() for its in saved.values() for k, value in its.items() if k != "step")
    assert sum(elements.values()) == total
    assert max(elements.values()) < 0.4 * total


def body_asynchronous(folder: str, own_writer: bool) -> tuple[Whole, Whole]:
    """The training goes on while the checkpoint is written."""
    with new_job(SMALL), default_group(f"{folder}.group"):
        model = Network()
        if own_writer:  # whose copies of tensors without dimensions are ordinary tensors
            model.scale = nn.Parameter(torch.tensor([1.5]))
        optimizer = sharded(model)
        train(model, optimizer, 0, SAVED, hvd.size(), hvd.rank())
        expected = whole_state(model, optimizer)
        saved = dcp.async_save(
            {"optimizer": optimizer.sharded_state_dict()},
            checkpoint_id=folder,
            storage_writer=dcp.FileSystemWriter(folder) if own_writer else None,
        )
        train(model, optimizer, SAVED, END, hvd.size(), hvd.rank())
        saved.result()
        state = {"optimizer": optimizer.sharded_state_dict()}
        dcp.load(state, checkpoint_id=folder)
        optimizer.load_state_dict(state["optimizer"])
        return whole_state(model, optimizer), expected


@pytest.mark.parametrize("own_writer", [False, True])
def test_asynchronous_save(two_ranks: RankPool, tmp_path: Path, own_writer: bool) -> None:
    """With each of torch's two ways to copy the state at once."""
    folder = str(tmp_path / "saved")
    for loaded, expected in two_ranks.run(body_asynchronous, folder, own_writer):
        assert_same(loaded, expected)


@on_ranks(3)
def test_before_the_first_step(tmp_path: Path) -> None:
    """A place to load into changes nothing; a checkpoint without a step is as torch makes it."""
    folder = str(tmp_path / "saved")
    with new_job(SMALL), default_group(f"{folder}.group"):
        model, other, alone = Network(), Network(), Network()
        optimizer, straight = sharded(model), sharded(other)
        before = whole_state(model, optimizer)
        optimizer.sharded_state_dict()
        assert whole_state(model, optimizer) == before == {}
        train(model, optimizer, 0, SAVED, hvd.size(), hvd.rank())
        train(other, straight, 0, SAVED, hvd.size(), hvd.rank())
        optimizer = sharded(model)
        dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=folder)
        state = {"optimizer": optimizer.sharded_state_dict()}
        dcp.load(state, checkpoint_id=folder)
        optimizer.load_state_dict(state["optimizer"])
        its_optimizer = optimizer_of(alone)
        get_optimizer_state_dict(alone, its_optimizer)
        ours = weights(model)
        straight = weights(other)
        state = whole_state(model, optimizer)
        torchs = whole_state(alone, its_optimizer)
    assert torch.equal(ours, straight)
    assert_same(state, torchs)


@pytest.mark.parametrize("whole", [False, True])
@on_ranks(2)
def test_rolls_back(tmp_path: Path, whole: bool) -> None:
    """A state in memory, to which the program goes back."""
    group = str(tmp_path / "group")
    with new_job(SMALL), default_group(group):
        model = Network()
        optimizer = sharded(model)
        train(model, optimizer, 0, SAVED, hvd.size(), hvd.rank())
        kept = copy.deepcopy(model.state_dict())
        # The whole state has memory of its own.
        state = optimizer.state_dict() if whole else copy.deepcopy(optimizer.sharded_state_dict())
        train(model, optimizer, SAVED, END, hvd.size(), hvd.rank())
        first = weights(model)
        model.load_state_dict(kept)
        optimizer.load_state_dict(state)
        train(model, optimizer, SAVED, END, hvd.size(), hvd.rank())
        second = weights(model)
    assert torch.equal(first, second)


@on_ranks(2)
def test_a_state_that_was_just_loaded_is_whole(tmp_path: Path) -> None:
    """The whole state of 16-bit weights, and that of an optimizer that has just loaded it."""
    group = str(tmp_path / "group")
    with new_job(SMALL), default_group(group):
        model, other = Network(torch.bfloat16), Network(torch.bfloat16)
        optimizer, loaded = sharded(model), sharded(other)
        train(model, optimizer, 0, SAVED, hvd.size(), hvd.rank())
        other.load_state_dict(model.state_dict())
        loaded.load_state_dict(optimizer.state_dict())
        states = whole_state(model, optimizer), whole_state(other, loaded)
        for each, its in ((model, optimizer), (other, loaded)):
            train(each, its, SAVED, END, hvd.size(), hvd.rank())
    assert_same(*states)
    assert torch.equal(weights(other), weights(model))


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.001),
    "Adam, rate in a tensor": lambda parameters: torch.optim.Adam(
        parameters, lr=torch.tensor(0.01), amsgrad=True
    ),
}


@on_ranks(2)
def test_every_kind_of_optimizer(tmp_path: Path) -> None:
    """Each kind of optimizer, resumed before its first step, against one that went on."""
    folder = str(tmp_path / "saved")
    with new_job(SMALL), default_group(f"{folder}.group"):
        for kind, make in KINDS.items():
            model, other = (Network(torch.bfloat16) for _ in range(2))
            optimizer = sharded(model, make(model.parameters()))
            train(model, optimizer, 0, SAVED, hvd.size(), hvd.rank())
            dcp.save(
                {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()},
                checkpoint_id=f"{folder}{kind}",
            )
            resumed = sharded(other, make(other.parameters()))
            state = {"model": other.state_dict(), "optimizer": resumed.sharded_state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}{kind}")
            other.load_state_dict(state["model"])
            resumed.load_state_dict(state["optimizer"])
            assert_same(whole_state(other, resumed), whole_state(model, optimizer))
            train(model, optimizer, SAVED, END, hvd.size(), hvd.rank())
            train(other, resumed, SAVED, END, hvd.size(), hvd.rank())
            assert torch.equal(weights(other), weights(model)), kind


def body_wrapped(group: str, compiled: bool) -> tuple[list[str], list[str]]:
    with new_job({}), default_group(group):
        inner = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4))
        model: Any = torch.compile(inner) if compiled else inner  # compiles nothing before a call
        names = [name for name, _ in model.named_parameters()]
        ours = sharded(model).sharded_state_dict()
        theirs = get_optimizer_state_dict(model, optimizer_of(model))
        assert names[0] not in ours["state"]
        groups = [[group["params"] for group in each["param_groups"]] for each in (ours, theirs)]
        assert groups[0] == groups[1]
        return sorted(ours["state"]), sorted(theirs["state"])


def test_names_are_those_of_torch(two_ranks: RankPool, tmp_path: Path) -> None:
    for compiled in (False, True):
        for ours, theirs in two_ranks.run(body_wrapped, f"{tmp_path}/group{compiled}", compiled):
            assert ours == theirs == ["0.bias", "0.weight", "1.bias", "1.weight"]


# ---- refusals ---------------------------------------------------------------------------------


@on_ranks(3)
def test_refusals(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    with new_job(SMALL):
        model, other = Network(), Network()
        ordinary = hvd.DistributedOptimizer(optimizer_of(other), other.named_parameters())
        told = {"not sharded": refused(ordinary.sharded_state_dict)}
        optimizer = sharded(model)
        told["no group"] = refused(optimizer.sharded_state_dict)
        with default_group(f"{folder}.group"):
            unnamed = hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(9))]),
                                               sharded=True)  # fmt: skip
            told["unnamed"] = refused(unnamed.sharded_state_dict)
            train(model, optimizer, 0, SAVED, hvd.size(), hvd.rank())
            dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=folder)
            before = whole_state(model, optimizer)

            larger = nn.ModuleDict(dict(Network().named_children()))
            larger.last = nn.Linear(31, 3)
            its_optimizer = sharded(larger)
            state = {"optimizer": its_optimizer.sharded_state_dict()}
            told["shape"] = refused(
                lambda: dcp.load(state, checkpoint_id=folder), dcp.api.CheckpointException
            )
            larger.last = nn.Linear(31, 2)
            larger.further = nn.Linear(2, 2)
            its_optimizer = sharded(larger)
            state = {"optimizer": its_optimizer.sharded_state_dict()}
            told["missing"] = refused(
                lambda: dcp.load(state, checkpoint_id=folder), dcp.api.CheckpointException
            )

            swapped = sharded(another := Network(), torch.optim.AdamW(another.parameters()))
            state = {"optimizer": swapped.sharded_state_dict()}
            dcp.load(state, checkpoint_id=folder)
            told["groups"] = refused(lambda: swapped.load_state_dict(state["optimizer"]))
            mine = optimizer.sharded_state_dict()
            if hvd.rank() == 1:
                mine["state"]["convolution.weight"]["exp_avg"] = torch.ones(23, 5, 3, 3)
            told["mixed"] = refused(lambda: optimizer.load_state_dict(mine))
            mine = optimizer.sharded_state_dict()
            mine["state"]["other"] = mine["state"].pop("last.bias")
            told["unknown"] = refused(lambda: optimizer.load_state_dict(mine))
            assert_same(whole_state(model, optimizer), before)

            fresh = sharded(other := Network())
            mine = fresh.sharded_state_dict()
            train(other, fresh, 0, 3, hvd.size(), hvd.rank())  # the state moves after the second
            told["moved"] = refused(lambda: fresh.load_state_dict(mine))
            told["used"] = refused(lambda: mine["state"]["last.bias"]["exp_avg"].sum())
    assert "sharded=True" in told["not sharded"]
    assert "get_optimizer_state_dict(model, optimizer)" in told["not sharded"]
    assert "call torch.distributed.init_process_group()" in told["no group"]
    assert "pass named_parameters=model.named_parameters()" in told["unnamed"]
    assert "Size mismatch between saved torch.Size([2, 31])" in told["shape"]
    assert "optimizer.state.last.weight." in told["shape"]
    assert "Missing key in checkpoint state_dict: optimizer.state.further." in told["missing"]
    assert "parameter group 0 has other parameters in the checkpoint" in told["groups"]
    assert "'middle.weight' there, where the optimizer has 'convolution.bias'" in told["groups"]
    assert "rank 1: 'exp_avg' of parameter 'convolution.weight' is a whole tensor" in told["mixed"]
    assert "has no parameter 'other'" in told["unknown"]
    assert "have moved since sharded_state_dict()" in told["moved"]
    assert "state_dict() has all" in told["used"]
