"""``DistributedOptimizer(..., sharded=True)``: results, memory, checkpoints, refusals, faults."""

from __future__ import annotations

import copy
import math
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.jobs import (
    SMALL,
    calls_on_rank_0,
    default_group,
    dies_between_the_halves,
    new_job,
    refused,
)
from helpers.ranks import RankFactory, RankPool, run_script, start_script
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


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, biases without weight decay."""
    named = list(model.named_parameters())
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


def train(
    make: str,
    clip: str,
    sharded: bool | None,
    uses: str = "",
    steps: int = STEPS,
    dtype: str = "float32",
) -> tuple[Any, Any]:
    """Trains; `sharded` is None in one process. Which rank uses the spare layer: see `uses`."""
    model = Network().to(getattr(torch, dtype))
    optimizer: Any = OPTIMIZERS[make](grouped(model))
    if sharded is not None:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), sharded=sharded
        )
    ranks, rank = (1, 0) if sharded is None else (hvd.size(), hvd.rank())
    for step in range(steps):
        x, y = (each.to(getattr(torch, dtype)) for each in batch(step))
        optimizer.zero_grad()
        outputs = model(x)
        if uses == "one rank" and step % 2:  # the rows of rank 0 of 3
            outputs = torch.stack([
                model(x[i : i + 1], spare=i % 3 == 0)[0] for i in range(rank, ROWS, ranks)
            ])  # fmt: skip
        else:
            outputs = outputs[rank::ranks]
        nn.functional.mse_loss(outputs, y[rank::ranks]).backward()
        if uses and sharded is not None:
            optimizer.synchronize()  # so that rank 0 clips what only others have
        CLIPS[clip](model)
        optimizer.step()
        if sharded:
            assert all(p.grad is None for p in model.parameters())
    return model, optimizer


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
    make: str, clip: str, uses: str, env: dict[str, str], dtype: str = "float32"
) -> dict[str, Any]:
    with new_job(env):
        model, optimizer = train(make, clip, True, uses, dtype=dtype)
        deferred = optimizer.overlap_report().deferred_parameters
        alone, its_optimizer = train(make, clip, None, uses, dtype=dtype)
        torch.testing.assert_close(weights(model), weights(alone), rtol=1e-5, atol=1e-6)
        ours, theirs = states(optimizer), states(its_optimizer)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=2e-4, atol=1e-6)
        return {"weights": weights(model), "deferred": deferred}


@pytest.mark.parametrize("clip", CLIPS)
def test_equals_one_process(three_ranks: RankPool, clip: str) -> None:
    results = three_ranks.run(body_train, "AdamW", clip, "", SMALL)
    for ours in results:
        assert torch.equal(ours["weights"], results[0]["weights"])
        assert ours["deferred"] > 5  # all that were read


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_every_kind_of_optimizer(three_ranks: RankPool, make: str) -> None:
    """In float64: RMSprop and Rprop make much of the last bits."""
    results = three_ranks.run(body_train, make, "", "", SMALL, "float64")
    assert all(torch.equal(ours["weights"], results[0]["weights"]) for ours in results)


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
    for ours in two_ranks.run(body_train, "AdamW", "norm", "", env):
        assert (ours["deferred"] > 5) == ("HVD_ORDER_CROSS_ITERATION" not in env)


def test_a_layer_that_one_rank_uses(three_ranks: RankPool) -> None:
    """And nobody in every other step: its state must then stay as it is."""
    for clip in ("norm", "infinity"):
        results = three_ranks.run(body_train, "AdamW", clip, "one rank", SMALL)
        assert all(torch.equal(ours["weights"], results[0]["weights"]) for ours in results)


# ---- memory -----------------------------------------------------------------------------------


def state_bytes(optimizer: Any) -> int:
    return cast("int", optimizer._hvd_exchange.shards.size_bytes)


def body_memory() -> tuple[int, int]:
    with new_job({}):
        model, alone = nn.Linear(400, 300), nn.Linear(400, 300)
        whole = torch.optim.AdamW(alone.parameters())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters()), model.named_parameters(), sharded=True
        )
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


# ---- 16 bits, loss scaling --------------------------------------------------------------------


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


def body_bfloat16() -> tuple[Tensor, Tensor, Tensor]:
    with new_job(SMALL):
        start = Network().bfloat16()
        model, alone, ordinary = (copy.deepcopy(start) for _ in range(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01),
            model.named_parameters(),
            sharded=True,
        )
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
        return weights(model), weights(alone), weights(ordinary)


def test_bfloat16_has_float32_masters(two_ranks: RankPool) -> None:
    for ours, with_masters, without in two_ranks.run(body_bfloat16):
        distance = (ours - with_masters).abs().mean()
        assert distance < 0.1 * (without - with_masters).abs().mean()


def body_changed_by_the_program() -> tuple[Tensor, Tensor]:
    with new_job(SMALL):
        model = nn.Linear(40, 30).bfloat16()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=2**-8), model.named_parameters(), sharded=True
        )
        for step in range(6):
            model(torch.ones(1, 40, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            if step == 4:
                with torch.no_grad():
                    model.weight.fill_(1.0)
        return model.weight.detach(), torch.full((30, 40), 1 - 2**-8, dtype=torch.bfloat16)


def test_masters_follow_the_program(two_ranks: RankPool) -> None:
    for ours, expected in two_ranks.run(body_changed_by_the_program):
        assert torch.equal(ours, expected)


def scaled(sharded: bool | None) -> tuple[list[float], Tensor]:
    """A GradScaler that meets an infinite gradient in step 4."""
    model = Network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if sharded is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sharded=sharded)
    ranks, rank = (1, 0) if sharded is None else (hvd.size(), hvd.rank())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    scales = []
    for step in range(STEPS):
        x, y = batch(step)
        if step == 4:
            y[-1, 0] = float("inf")  # of the last rank
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        scaler.scale(nn.functional.mse_loss(model(x[rank::ranks]), y[rank::ranks])).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, weights(model)


def body_scaled() -> tuple[Any, Any]:
    with new_job(SMALL):
        return scaled(True), scaled(None)


def test_loss_scaling(three_ranks: RankPool) -> None:
    results = three_ranks.run(body_scaled)
    for (scales, ours), (its_scales, alone) in results:
        assert scales == its_scales
        assert scales[4] < scales[3]  # a step was left out
        assert torch.equal(ours, results[0][0][1])
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)


# ---- unusual steps ----------------------------------------------------------------------------


def set_gradients(model: nn.Module, loss: Tensor) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


def unusual(kind: str, sharded: bool | None) -> Tensor:
    model = Network()
    passes = 2 if kind == "accumulation" else 1
    first = [p for name, p in model.named_parameters() if kind != "added" or "last" not in name]
    optimizer: Any = torch.optim.AdamW(first, lr=0.01)
    if sharded is not None:
        named = [(name, p) for name, p in model.named_parameters() if any(p is q for q in first)]
        optimizer = hvd.DistributedOptimizer(
            optimizer, named, backward_passes_per_step=passes, sharded=sharded
        )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    ranks, rank = (1, 0) if sharded is None else (hvd.size(), hvd.rank())
    for step in range(STEPS):
        if kind == "added" and step == 5:
            optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.02})
        optimizer.zero_grad()
        for part in range(passes):
            x, y = batch(passes * step + part)
            loss = nn.functional.mse_loss(model(x[rank::ranks]), y[rank::ranks])
            if kind == "by hand":
                set_gradients(model, loss)
            else:
                loss.backward()
        if kind in ("synchronize", "by hand") and sharded is not None:  # as with Horovod
            optimizer.synchronize()
        if kind in ("synchronize", "by hand", "cleared"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if kind == "cleared" and step % 3 == 1:
            model.zero_grad()  # not by the optimizer
            continue
        if kind == "closure":
            assert optimizer.step(lambda: loss) is loss  # noqa: B023 - called at once
        else:
            optimizer.step()
        schedule.step()
    return weights(model)


def body_unusual(kind: str) -> tuple[Tensor, Tensor]:
    with new_job(SMALL):
        return unusual(kind, True), unusual(kind, None)


@pytest.mark.parametrize(
    "kind", ["accumulation", "added", "synchronize", "by hand", "cleared", "closure"]
)
def test_unusual_steps(three_ranks: RankPool, kind: str) -> None:
    results = three_ranks.run(body_unusual, kind)
    for ours, alone in results:
        assert torch.equal(ours, results[0][0])
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)


def body_process_set() -> tuple[Tensor, Tensor] | None:
    with new_job(SMALL):
        pair = hvd.add_process_set([0, 2])
        if not pair.included():
            return None
        model, alone = Network(), Network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01),
            model.named_parameters(),
            process_set=pair,
            sharded=True,
        )
        plain = torch.optim.AdamW(alone.parameters(), lr=0.01)
        for step in range(STEPS):
            x, y = batch(step)
            mine = slice(pair.rank(), None, 2)
            nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
            optimizer.step()
            plain.zero_grad()
            nn.functional.mse_loss(alone(x), y).backward()
            plain.step()
        return weights(model), weights(alone)


def test_process_set(three_ranks: RankPool) -> None:
    first, outside, second = three_ranks.run(body_process_set)
    assert outside is None
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[0], first[1], rtol=1e-5, atol=1e-6)


# ---- checkpoints ------------------------------------------------------------------------------


def body_checkpoint() -> tuple[Tensor, Tensor]:
    """Two sharded optimizers take over from each other, and from one process."""
    with new_job(SMALL):
        expected, _ = train("AdamW", "", None)
        alone, its_optimizer = train("AdamW", "", None, steps=4)
        model, optimizer = train("AdamW", "", True, steps=2)
        model.load_state_dict(alone.state_dict())
        optimizer.load_state_dict(its_optimizer.state_dict())
        other = Network()
        other.load_state_dict(model.state_dict())
        before = OPTIMIZERS["AdamW"](grouped(other))
        before.load_state_dict(optimizer.state_dict())  # before it is distributed
        last: Any = hvd.DistributedOptimizer(before, other.named_parameters(), sharded=True)
        for step in range(4, STEPS):
            x, y = batch(step)
            mine = slice(hvd.rank(), None, hvd.size())
            last.zero_grad()
            nn.functional.mse_loss(other(x[mine]), y[mine]).backward()
            last.step()
        return weights(other), weights(expected)


def test_checkpoints(three_ranks: RankPool) -> None:
    for ours, expected in three_ranks.run(body_checkpoint):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def body_broadcast() -> tuple[float, Tensor, Tensor]:
    with new_job({}):
        model = Network()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + hvd.rank()))
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sharded=True)
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        for step in range(3):
            nn.functional.mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
        before = optimizer.state_dict()["state"][0]["exp_avg"]
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        return (
            optimizer.param_groups[0]["lr"],
            before,
            optimizer.state_dict()["state"][0]["exp_avg"],
        )


def test_broadcast_sends_hyper_parameters(two_ranks: RankPool) -> None:
    for lr, before, after in two_ranks.run(body_broadcast):
        assert lr == 0.02
        assert before.abs().sum() > 0
        assert torch.equal(before, after)


def test_state_dict_on_one_rank_only() -> None:
    env = {"HVD_ORDER_STALL_WARNING": "1", "HVD_ORDER_TIMEOUT": "6"}
    ended = run_script(2, calls_on_rank_0("state_dict"), env=env, timeout=60)
    assert ended[0].returncode != 0
    assert "state_dict() of a sharded optimizer, which every rank has to call" in ended[0].stderr
    assert "rank 1" in ended[0].stderr


def body_distributed_checkpoint(folder: str, begin: int, end: int) -> float:
    """Loads what was saved at step `begin`, trains on, saves at `end`; a sum of the weights."""
    with new_job({}), default_group(f"{folder}.group{hvd.size()}.{begin}.{end}"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(37, 51), nn.Tanh(), nn.Linear(51, 3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters(), sharded=True
        )
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


def body_masters_in_checkpoint() -> tuple[Tensor, Tensor]:
    with new_job(SMALL):
        models = []
        for restart in (None, 5):
            torch.manual_seed(1)
            model = nn.Linear(40, 30).bfloat16()
            optimizer: Any = None
            for step in range(10):
                if optimizer is None or step == restart:
                    saved = optimizer and optimizer.state_dict()
                    optimizer = hvd.DistributedOptimizer(
                        torch.optim.SGD(model.parameters(), lr=1e-4),
                        model.named_parameters(),
                        sharded=True,
                    )
                    if saved:
                        optimizer.load_state_dict(saved)
                model(torch.ones(1, 40, dtype=torch.bfloat16)).square().sum().backward()
                optimizer.step()
            models.append(weights(model))
        return models[0], models[1]


def test_masters_are_in_the_checkpoint(two_ranks: RankPool) -> None:
    for straight, resumed in two_ranks.run(body_masters_in_checkpoint):
        assert torch.equal(straight, resumed)


# ---- refusals ---------------------------------------------------------------------------------


def body_refusals() -> dict[str, str]:
    with new_job({}):

        def make(optimizer: Any = None, **options: Any) -> tuple[nn.Module, Any]:
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            inner = (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1)
            return model, hvd.DistributedOptimizer(
                inner, model.named_parameters(), sharded=True, **options
            )

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
        return told


def body_clipped_without() -> str:
    with new_job({}):
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sharded=True
        )
        model[hvd.rank()](torch.ones(1, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return refused(optimizer.step)


def test_gradients_that_were_not_clipped(two_ranks: RankPool) -> None:
    for text in two_ranks.run(body_clipped_without):
        assert "has no gradient on rank" in text
        assert "call optimizer.synchronize() after backward()" in text


def body_infinity_norms(clips: list[bool]) -> list[str]:
    """What reads of an infinity norm raise, by step; in the other steps there are none."""
    with new_job({}):
        model = nn.Linear(8, 8)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sharded=True
        )
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


def test_refusals(two_ranks: RankPool) -> None:
    for told in two_ranks.run(body_refusals):
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


def body_one_rank_has_state() -> str:
    with new_job({}):
        model = nn.Linear(8, 8)
        inner = torch.optim.Adam(model.parameters())
        if hvd.rank() == 0:
            model(torch.ones(1, 8)).sum().backward()
            inner.step()
            inner.zero_grad()
        return refused(
            lambda: hvd.DistributedOptimizer(inner, model.named_parameters(), sharded=True)
        )


def test_a_checkpoint_on_one_rank_only(two_ranks: RankPool) -> None:
    for text in two_ranks.run(body_one_rank_has_state):
        assert "empty on rank 1" in text
        assert "every rank loads the checkpoint" in text


# ---- a rank that dies -------------------------------------------------------------------------


def test_a_rank_dies_before_its_update() -> None:
    program = dies_between_the_halves(sharded=True)
    with start_script(3, program, env={"HVD_ORDER_TIMEOUT": "20"}) as script:
        script.wait_for_output(1, "between the halves")
        script.kill(1)
        ended = script.wait(timeout=40)
    assert ended[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ended[rank].returncode == 3, ended[rank].stderr
        assert "raised PeerLost: rank 1 is gone" in ended[rank].stdout
