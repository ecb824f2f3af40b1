"""Two that average the same gradients: an error at the first backward pass, with the cure."""

from __future__ import annotations

import gc
import sys
import types

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.ranks import run_script
from torch import nn

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage


def wrapped(model: nn.Module) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """A step of two ranks moves each weight by -0.75: the rate times the mean of 1 and 2."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 3), 1.0 + hvd.rank(), dtype=torch.float64)).sum().backward()
        optimizer.step()


@on_ranks(2)
def test_a_second_optimizer_on_the_same_parameters_is_refused() -> None:
    model = nn.Linear(3, 1, dtype=torch.float64)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    start = model.weight.detach().clone()
    first = wrapped(model)
    second = wrapped(model)
    for optimizer in (first, second):
        with pytest.raises(
            InvalidUsage, match=r"rank \d: parameter '(bias|weight)' belongs to two dist"
        ):
            train(model, optimizer, 1)
    assert torch.equal(model.weight, start)
    Holder(first)  # garbage in a cycle, after the second one was made
    del optimizer, first
    train(model, second, 2)
    moved = (model.weight.detach() - start).flatten().tolist()
    assert moved == pytest.approx([-1.5] * 3, abs=1e-12)


class Holder:
    """Refers to itself: not gone until the garbage collector comes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.myself = self


@on_ranks(2)
def test_an_optimizer_may_follow_one_that_is_garbage() -> None:
    model = nn.ModuleDict(
        {
            "used": nn.Linear(3, 1, dtype=torch.float64),
            "unused": nn.Linear(3, 1, dtype=torch.float64),
        }
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    start = model["used"].weight.detach().clone()
    gc.disable()
    try:
        # Updates are deferred at the end, of parameters that nobody reads as well.
        for steps in (4, 1, 3):
            optimizer = wrapped(model)
            Holder(optimizer)
            train(model["used"], optimizer, steps)
    finally:
        gc.enable()
    moved = (model["used"].weight.detach() - start).flatten().tolist()
    assert moved == pytest.approx([-6.0] * 3, abs=1e-12)


@on_ranks(2)
def test_optimizers_of_different_parameters_live_side_by_side() -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)
    first, second = wrapped(generator), wrapped(critic)
    for _ in range(3):
        train(generator, first, 1)
        train(critic, second, 1)
    torch.manual_seed(1)
    late = nn.Linear(3, 1, dtype=torch.float64)
    second.add_param_group({"params": list(late.parameters())})
    train(late, second, 1)
    second.add_param_group({"params": list(generator.parameters())})
    with pytest.raises(InvalidUsage, match="belongs to two distributed optimizers"):
        train(generator, second, 1)


def of_horovod(self: object, parameter: torch.Tensor) -> None:
    """Where Horovod 0.28's optimizer, a class of its own made of this, starts an all-reduce."""


@on_ranks(2)
def test_an_optimizer_of_horovod_is_refused() -> None:
    of_horovod.__module__ = "horovod.torch.optimizer"
    theirs = type("SGD", (torch.optim.SGD,), {"_allreduce_grad_async": of_horovod})
    torch.manual_seed(2)
    model = nn.Linear(3, 1, dtype=torch.float64)
    optimizer = wrapped(model)
    other = theirs(model.parameters(), lr=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "horovod.torch.mpi_lib_v2", types.ModuleType("mpi_lib_v2"))
        with pytest.raises(InvalidUsage, match=r"'(weight|bias)' .* Horovod's own Distributed"):
            train(model, optimizer, 1)
        del other
        train(model, optimizer, 1)


# The process group is the script's own, and lasts as long as its processes.
WRAPPED_MODELS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hvd_order.torch as hvd

if sys.argv[1] == "before":
    dist.init_process_group("gloo")
hvd.init()
if sys.argv[1] == "after":
    dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (hvd.size(),))


def ddp(model):
    return DistributedDataParallel(model)

def frozen_ddp(model):
    model.append(nn.Linear(1, 1).requires_grad_(False))
    return DistributedDataParallel(model)

def fsdp1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

def fsdp1_keeping_parameters(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

def fsdp2(model):
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model):
    return parallelize_module(model, mesh, {"0": ColwiseParallel()})


for wrap in (ddp, frozen_ddp, fsdp1, fsdp1_keeping_parameters, fsdp2, tensor_parallel):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    try:
        model = wrap(inner)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
        model(torch.ones(2, 4)).sum().backward()
        print(f"{wrap.__name__}: silent")
    except Exception as error:
        print(f"{wrap.__name__}: {type(error).__name__}: {error}")

# What DDP was told to leave alone may be averaged by somebody else.
torch.manual_seed(3)
model = nn.ModuleDict({"theirs": nn.Linear(2, 2), "ours": nn.Linear(2, 1)})
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
    model, ["ours.weight", "ours.bias"]
)
model.forward = lambda x: model["ours"](model["theirs"](x))
wrapper = DistributedDataParallel(model)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model["ours"].parameters(), lr=0.1))
for _ in range(3):
    optimizer.zero_grad()
    wrapper(torch.ones(2, 2)).sum().backward()
    optimizer.step()
optimizer.flush()
print("done")
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_that_is_wrapped_already_is_refused(when: str) -> None:
    for rank, end in enumerate(run_script(2, WRAPPED_MODELS, when, timeout=110)):
        assert end.returncode == 0, end.stderr
        said = dict(line.split(": ", 1) for line in end.stdout.splitlines() if ": " in line)
        for kind in ("ddp", "frozen_ddp"):
            assert said[kind].startswith(
                f"InvalidUsage: rank {rank}: parameter 'allreduce.noname.0."
            )
            assert "is in a DistributedDataParallel module, which averages its grad" in said[kind]
            assert "Train the model without DistributedDataParallel" in said[kind]
        for kind in ("fsdp1", "fsdp1_keeping_parameters"):
            assert said[kind].startswith("InvalidUsage: "), said[kind]
            assert "FullyShardedDataParallel" in said[kind]
        assert said["fsdp2"].startswith("InvalidUsage: "), said["fsdp2"]
        assert "is sharded by fully_shard()" in said["fsdp2"]
        assert "tensor parallelism" in said["tensor_parallel"], said["tensor_parallel"]
        assert "Shard(dim=0)" in said["tensor_parallel"]
        assert end.stdout.endswith("done\n")
