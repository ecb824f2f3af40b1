"""``DistributedOptimizer(..., sharded=True)``: results, memory, checkpoints, refusals.

A rank that dies: test_split_all_reduce.py.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.jobs import SMALL, default_group, new_job, refused
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory, RankPool, run_script
from helpers.training.optimizers import Normed
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage

STEPS = 9
ROWS = 12  # divided by 2, 3 and 4 ranks
Make = Callable[[Any], torch.optim.Optimizer]


class Network(nn.Module):
    """Some layers in an order of use that is not that of registration, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(30, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Conv1d(5, 51, 7)
        self.middle = nn.Linear(51, 30)
        self.spare = nn.Linear(30, 3)
        # Elements in another order than their numbers.
        self.first.weight = nn.Parameter(self.first.weight.detach().transpose(1, 2).contiguous()
                                         .transpose(1, 2))  # fmt: skip

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        hidden = self.scale * self.middle(self.first(x).amax(-1).relu()).relu()
        found: Tensor = self.spare(hidden) if spare else self.last(hidden)
        return found


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 5, 11, generator=numbers), torch.randn(ROWS, 3, generator=numbers)


def grouped(model: nn.Module, without: str = " ") -> list[dict[str, Any]]:
    """Two groups, biases without weight decay."""
    named = [(name, p) for name, p in model.named_parameters() if without not in name]
    return [
        {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.01},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0, "lr": 0.03},
    ]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "Adam, fused": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.003, momentum=0.5, centered=True),
    "Rprop": lambda groups: torch.optim.Rprop([{"params": g["params"]} for g in groups], lr=0.01),
}
CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "": lambda _: None,
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "infinity": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.02, math.inf),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
}


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), sharded=True, **how)


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        kind: of an unusual loop, or "".
    """

    make: str = "AdamW"
    clip: str = ""
    kind: str = ""
    dtype: str = "float32"


CASES = {
    **{clip or "not clipped": Case(clip=clip) for clip in CLIPS},
    # In float64: RMSprop and Rprop make much of the last bits.
    **{make: Case(make, dtype="float64") for make in OPTIMIZERS},
    # Nobody uses it in every other step: its state must then stay as it is.
    "a layer that one rank uses": Case(clip="norm", kind="one rank"),
    "a layer that one rank uses, infinity": Case(clip="infinity", kind="one rank"),
    **{kind: Case(kind=kind) for kind in ("accumulation", "added", "closure")},
    # The first two as with Horovod; the third leaves steps out.
    **{kind: Case(clip="norm", kind=kind) for kind in ("synchronize", "by hand", "cleared")},
    "scaled": Case(clip="norm", kind="scaled"),  # with an infinite gradient in step 4
}
Trained = tuple[Any, Any, list[float]]


def train(
    case: Case,
    ranks: hvd.ProcessSet | None,
    steps: range = range(STEPS),
    before: tuple[nn.Module, Any] | None = None,
) -> Trained:
    """Trains on some ranks, or in one process; with the model and optimizer of before, or new ones.

    Returns:
        Model, optimizer, and the scale of the loss by step.
    """
    dtype = getattr(torch, case.dtype)
    passes = 2 if case.kind == "accumulation" else 1
    if before is None:
        model: Any = Network().to(dtype)
        without = "last" if case.kind == "added" else " "
        optimizer: Any = OPTIMIZERS[case.make](grouped(model, without))
        if ranks is not None:
            names = [(name, p) for name, p in model.named_parameters() if without not in name]
            optimizer = hvd.DistributedOptimizer(
                optimizer, names, backward_passes_per_step=passes, sharded=True, process_set=ranks
            )
    else:
        model, optimizer = before
    rank, size = (0, 1) if ranks is None else (ranks.rank(), ranks.size())
    rate = 1.0 if not case.kind else 0.5  # of a schedule
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, rate)
    is_scaled = case.kind == "scaled"
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=is_scaled)
    scales = []
    for step in steps:
        if case.kind == "added" and step == 5:
            optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.02})
        optimizer.zero_grad(set_to_none=not is_scaled or step % 2 == 0)
        for part in range(passes):
            x, y = (each.to(dtype) for each in batch(passes * step + part))
            if is_scaled and step == 4:
                y[-1, 0] = math.inf  # of the last rank
            if case.kind == "one rank" and step % 2:  # the rows of rank 0 of 3
                found = torch.stack([
                    model(x[i : i + 1], spare=i % 3 == 0)[0] for i in range(rank, ROWS, size)
                ])  # fmt: skip
            else:
                found = model(x[rank::size])
            loss = nn.functional.mse_loss(found, y[rank::size])
            if case.kind == "by hand":
                set_gradients(model, loss)
            else:
                scaler.scale(loss).backward()
        if ranks is not None and case.kind in ("one rank", "synchronize", "by hand"):
            optimizer.synchronize()  # for one: so that rank 0 clips what only others have
        scaler.unscale_(optimizer)
        CLIPS[case.clip](model)
        if case.kind == "cleared" and step % 3 == 1:
            model.zero_grad()  # not by the optimizer
            continue
        if case.kind == "closure":
            assert optimizer.step(lambda: loss) is loss  # noqa: B023 - called at once
        else:
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
        schedule.step()
        if ranks is not None and case.kind in ("", "one rank"):
            assert all(p.grad is None for p in model.parameters())
    return model, optimizer, scales


def set_gradients(model: nn.Module, loss: Tensor) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def states(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = optimizer.state_dict()["state"]
    return {
        f"{i} {key}": torch.as_tensor(value, dtype=torch.float64)
        for i, values in sorted(found.items())
        for key, value in values.items()
    }


def body_train(
    name: str, env: dict[str, str], members: list[int] | None = None
) -> tuple[Tensor, int] | None:
    """Weights and deferred parameters of a training that has the results of one process."""
    case = CASES[name]
    with new_job(env):
        ranks = hvd.add_process_set(members) if members else hvd.global_process_set
        if not ranks.included():
            return None
        model, optimizer, scales = train(case, ranks)
        deferred = optimizer.overlap_report().deferred_parameters
        alone, its_optimizer, its_scales = train(case, None)
        assert scales == its_scales
        assert case.kind != "scaled" or scales[4] < scales[3]  # a step was left out
        torch.testing.assert_close(weights(model), weights(alone), rtol=1e-5, atol=1e-6)
        ours, theirs = states(optimizer), states(its_optimizer)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=2e-4, atol=1e-6)
        return weights(model), deferred


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(three_ranks: RankPool, name: str) -> None:
    results = three_ranks.run(body_train, name, SMALL)
    for found, deferred in results:
        assert torch.equal(found, results[0][0])
        assert deferred > 5 or CASES[name].kind  # all that were read


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"HVD_ORDER_AGREEMENT": "negotiated"},
        {"HVD_ORDER_AGREEMENT": "planned"},
        {"HVD_ORDER_CROSS_ITERATION": "0"},
    ],
)
def test_every_agreement(two_ranks: RankPool, env: dict[str, str]) -> None:
    for _, deferred in two_ranks.run(body_train, "norm", env):
        assert (deferred > 5) == ("HVD_ORDER_CROSS_ITERATION" not in env)


def test_process_set(three_ranks: RankPool) -> None:
    first, outside, second = three_ranks.run(body_train, "not clipped", SMALL, [0, 2])
    assert outside is None
    assert torch.equal(first[0], second[0])


# ---- memory -----------------------------------------------------------------------------------


def state_bytes(optimizer: Any) -> int:
    return cast("int", optimizer._hvd_exchange.shards.size_bytes)


def body_memory() -> tuple[int, int]:
    with new_job({}):
        model, alone = nn.Linear(400, 300), nn.Linear(400, 300)
        whole = torch.optim.AdamW(alone.parameters())
        optimizer = sharded(model, torch.optim.AdamW(model.parameters()))
        for _ in range(4):
            model(torch.ones(2, 400)).square().mean().backward()
            optimizer.step()
        alone(torch.ones(2, 400)).square().mean().backward()
        whole.step()
        sizes = [value.nbytes for values in whole.state.values() for value in values.values()]
        return state_bytes(optimizer), sum(sizes)


def test_state_is_a_part_of_the_whole(ranks: RankFactory) -> None:
    results = ranks(4).run(body_memory)
    for mine, whole in results:
        assert mine <= 0.27 * whole
    assert sum(mine for mine, _ in results) >= results[0][1]


# ---- 16 bits ----------------------------------------------------------------------------------


class Masters:
    """One process with bfloat16 weights, and AdamW on float32 copies."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._masters = [p.detach().float() for p in model.parameters()]
        self._optimizer = torch.optim.AdamW(self._masters, lr=0.01)

    def step(self) -> None:
        for master, parameter in zip(self._masters, self._model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self._optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._model.parameters(), strict=True):
                parameter.copy_(master)
                parameter.grad = None


@on_ranks(2)
def test_bfloat16_has_float32_masters() -> None:
    with new_job(SMALL):
        start = Network().bfloat16()
        model, alone, ordinary = (copy.deepcopy(start) for _ in range(3))
        optimizer = sharded(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        masters = Masters(alone)
        plain = torch.optim.AdamW(ordinary.parameters(), lr=0.01)
        for step in range(40):
            x, y = (each.bfloat16() for each in batch(step % 4))
            # The same rows on all ranks: their average has no rounding of its own.
            for each in (model, alone, ordinary):
                nn.functional.mse_loss(each(x), y).backward()
            optimizer.step()
            masters.step()
            plain.step()
            plain.zero_grad()
        ours = weights(model)
        with_masters = weights(alone)
        without = weights(ordinary)
    distance = (ours - with_masters).abs().mean()
    assert distance < 0.1 * (without - with_masters).abs().mean()


@on_ranks(2)
def test_masters_follow_the_program() -> None:
    with new_job(SMALL):
        model = nn.Linear(40, 30).bfloat16()
        optimizer = sharded(model, torch.optim.SGD(model.parameters(), lr=2**-8))
        for step in range(6):
            model(torch.ones(1, 40, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            if step == 4:
                with torch.no_grad():
                    model.weight.fill_(1.0)
        ours = model.weight.detach()
        expected = torch.full((30, 40), 1 - 2**-8, dtype=torch.bfloat16)
    assert torch.equal(ours, expected)


# ---- checkpoints ------------------------------------------------------------------------------


@on_ranks(3)
def test_checkpoints() -> None:
    """Two sharded optimizers take over from each other, and from one process."""
    with new_job(SMALL):
        case, ranks = CASES["not clipped"], hvd.global_process_set
        expected, _, _ = train(case, None)
        alone, its_optimizer, _ = train(case, None, range(4))
        model, optimizer, _ = train(case, ranks, range(2))
        model.load_state_dict(alone.state_dict())
        optimizer.load_state_dict(its_optimizer.state_dict())
        other = Network()
        other.load_state_dict(model.state_dict())
        before = OPTIMIZERS["AdamW"](grouped(other))
        before.load_state_dict(optimizer.state_dict())  # before it is distributed
        train(case, ranks, range(4, STEPS), (other, sharded(other, before)))
        ours = weights(other)
        expected = weights(expected)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_broadcast_sends_hyper_parameters() -> None:
    with new_job({}):
        model = Network()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + hvd.rank()))
        optimizer = sharded(model, inner)
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        for step in range(3):
            nn.functional.mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
        before = optimizer.state_dict()["state"][0]["exp_avg"]
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        lr = optimizer.param_groups[0]["lr"]
        after = optimizer.state_dict()["state"][0]["exp_avg"]
    assert lr == 0.02
    assert before.abs().sum() > 0
    assert torch.equal(before, after)


ON_RANK_0 = """
import torch
import hvd_order.torch as hvd

hvd.init()
model = torch.nn.Linear(8, 8)
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters()), model.named_parameters(), sharded=True
)
for step in range(5):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if step == 3 and hvd.rank() == 0:
        optimizer.state_dict()
"""


def test_state_dict_on_one_rank_only() -> None:
    env = {"HVD_ORDER_STALL_WARNING": "1", "HVD_ORDER_TIMEOUT": "6"}
    ended = run_script(2, ON_RANK_0, env=env, timeout=60)
    assert ended[0].returncode != 0
    assert "state_dict() of a sharded optimizer, which every rank has to call" in ended[0].stderr
    assert "rank 1" in ended[0].stderr


def body_distributed_checkpoint(folder: str, begin: int, end: int) -> float:
    """Loads what was saved at step `begin`, trains on, saves at `end`; a sum of the weights."""
    with new_job({}), default_group(f"{folder}.group{hvd.size()}.{begin}.{end}"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(37, 51), nn.Tanh(), nn.Linear(51, 3))
        optimizer = sharded(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        if begin:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            saved = {"model": of_model, "optimizer": of_optimizer}
            dcp.load(saved, checkpoint_id=f"{folder}{begin}")
            set_state_dict(
                model,
                optimizer,
                model_state_dict=saved["model"],
                optim_state_dict=saved["optimizer"],
            )
        for step in range(begin, end):
            x = torch.randn(6, 37, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x[hvd.rank() :: hvd.size()]).square().mean().backward()
            optimizer.step()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=f"{folder}{end}")
        return weights(model).sum().item()


def test_distributed_checkpoint(ranks: RankFactory, tmp_path: Path) -> None:
    """Saved by 2 ranks after 4 steps, resumed by 3; against 2 ranks that went on."""
    folder = str(tmp_path / "after")
    expected = ranks(2).run(body_distributed_checkpoint, folder, 0, 8)[0]
    ranks(2).run(body_distributed_checkpoint, folder, 0, 4)
    resumed = ranks(3).run(body_distributed_checkpoint, folder, 4, 8)[0]
    assert resumed == pytest.approx(expected, rel=1e-5)


# ---- refusals ---------------------------------------------------------------------------------


@on_ranks(2)
def test_refusals() -> None:
    with new_job({}):

        def make(optimizer: Any = None, **options: Any) -> tuple[nn.Module, Any]:
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            inner = (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1)
            return model, sharded(model, inner, **options)

        def backward() -> tuple[nn.Module, Any]:
            model, optimizer = make()
            model(torch.ones(1, 8)).sum().backward()
            return model, optimizer

        told = {
            "norms": refused(lambda: make(Normed)),
            "factored": refused(lambda: make(torch.optim.Adafactor)),
            "closures": refused(lambda: make(torch.optim.LBFGS)),
            "compression": refused(lambda: make(compression=hvd.Compression.fp16)),
            "Adasum": refused(lambda: make(op=hvd.Adasum)),
        }
        model, optimizer = backward()
        told["read"] = refused(lambda: model[0].weight.grad.sum())
        held = model[0].weight.grad
        optimizer.step()
        told["read later"] = refused(lambda: held.sum())
        told["pickle"] = refused(lambda: pickle.dumps(optimizer))
        told["join"] = refused(hvd.join)
        model, optimizer = backward()
        model[0].weight.grad = torch.zeros(8, 8)
        told["replaced"] = refused(optimizer.step)
    assert "Normed does not update each element by itself" in told["norms"]
    assert "Adafactor" in told["factored"]
    assert "LBFGS looks across all parameters" in told["closures"]
    assert "drop it" in told["compression"]
    assert "Adasum has none" in told["Adasum"]
    assert "leave sharded out" in told["read"]
    assert told["read later"] == told["read"]
    assert "use state_dict() on every rank" in told["pickle"]
    assert "need this rank's shards" in told["join"]
    assert "cannot be replaced" in told["replaced"]


@on_ranks(2)
def test_gradients_that_were_not_clipped() -> None:
    with new_job({}):
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        optimizer = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model[hvd.rank()](torch.ones(1, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        text = refused(optimizer.step)
    assert "has no gradient on rank" in text
    assert "call optimizer.synchronize() after backward()" in text


def body_infinity_norms(clips: list[bool]) -> list[str]:
    """What reads of an infinity norm raise, by step; in the other steps there are none."""
    with new_job({}):
        model = nn.Linear(8, 8)
        optimizer = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1))
        told = []
        for clip in clips:
            model(torch.ones(1, 8)).square().sum().backward()
            found = ""
            if clip:
                try:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0, math.inf)
                except InvalidUsage as error:
                    found = str(error)
            told.append(found)
            optimizer.step()
        return told


def test_infinity_norms_that_come_late(two_ranks: RankPool) -> None:
    """They are known in the first two steps, and later if one was read there."""
    for told in two_ranks.run(body_infinity_norms, [True, False, False, True, True]):
        assert told == 5 * [""]
    for told in two_ranks.run(body_infinity_norms, [False, False, False, True, False]):
        assert "the infinity norm of gradients is not known here: none had been read" in told[3]


@on_ranks(2)
def test_a_checkpoint_on_one_rank_only() -> None:
    with new_job({}):
        model = nn.Linear(8, 8)
        inner = torch.optim.Adam(model.parameters())
        if hvd.rank() == 0:
            model(torch.ones(1, 8)).sum().backward()
            inner.step()
            inner.zero_grad()
        text = refused(lambda: sharded(model, inner))
    assert "empty on rank 1" in text
    assert "every rank loads the checkpoint" in text
