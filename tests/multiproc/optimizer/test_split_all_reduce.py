"""Clipping and unscaling while sums are on their way: results, overlap, faults."""

from __future__ import annotations

import copy
import io
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.jobs import SMALL, dies_between_the_halves, new_job
from helpers.ranks import RankFactory, RankPool, start_script
from torch import Tensor, nn

import hvd_order.torch as hvd

STEPS = 8
ROWS = 12  # divided by 2, 3 and 4 ranks
Clip = Callable[[nn.Module, torch.optim.Optimizer], Any]
SPLIT = {"HVD_ORDER_SPLIT": "always", **SMALL}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(37, 51), nn.ReLU(), nn.Linear(51, 30), nn.ReLU())
    layers.append(nn.Linear(30, 3))
    return layers.to(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 37, generator=numbers), torch.randn(ROWS, 3, generator=numbers)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def by_hand(model: nn.Module, _: torch.optim.Optimizer) -> float:
    squares = [gradient.detach().data.norm(2).item() ** 2 for gradient in gradients_of(model)]
    norm: float = sum(squares) ** 0.5
    for gradient in gradients_of(model):
        if norm > 0.1:
            gradient.data *= 0.1 / norm
    return norm


def by_lists(model: nn.Module, _: torch.optim.Optimizer) -> Tensor:
    gradients = gradients_of(model)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)))
    torch._foreach_div_(gradients, (norm / 0.1).clamp(min=1.0))
    return norm


def twice(model: nn.Module, _: torch.optim.Optimizer) -> Tensor:
    """The second norm is that of clipped gradients."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.03, error_if_nonfinite=True)


def value_then_norm(model: nn.Module, _: torch.optim.Optimizer) -> Tensor:
    """The norm after clamping is not known before the sums have arrived."""
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.03)


def first_rank_looks(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """One rank waits for all of one gradient; the others do not, and must not be needed."""
    if hvd.rank() == 0:
        assert gradients_of(model)[0][0].abs().sum() > 0
    return torch_norm(model, optimizer)


def torch_norm(model: nn.Module, _: torch.optim.Optimizer) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


CLIPS: dict[str, Clip] = {
    "clip_grad_norm_": torch_norm,
    "by hand": by_hand,
    "lists": by_lists,
    "twice": twice,
    "value": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.003),
    "infinity norm": lambda model, _: nn.utils.clip_grad_norm_(
        model.parameters(), 0.02, norm_type=float("inf")
    ),
    "value, then norm": value_then_norm,
    "rank 0 looks": first_rank_looks,
}
COMPLETES = {"infinity norm", "value, then norm"}  # before step(): nothing is left to overlap


def train(clip: str, distributed: bool) -> dict[str, Any]:
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    mine = slice(hvd.rank(), None, hvd.size()) if distributed else slice(None)
    answers = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        answer = CLIPS[clip](model, optimizer)
        answers.append(0.0 if answer is None else float(answer))
        optimizer.step()
    return {
        "answers": torch.tensor(answers),
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "deferred": optimizer.overlap_report().deferred_parameters if distributed else 0,
    }


def body_train(clip: str, env: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    with new_job(env):
        return train(clip, distributed=True), train(clip, distributed=False)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("clip", CLIPS)
def test_equals_one_process(ranks: RankFactory, clip: str, size: int) -> None:
    results = ranks(size).run(body_train, clip, SPLIT)
    for ours, alone in results:
        assert torch.equal(ours["weights"], results[0][0]["weights"])
        torch.testing.assert_close(ours["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours["answers"], alone["answers"])
    deferred = [ours["deferred"] for ours, _ in results]
    looks = clip == "rank 0 looks"
    assert deferred == [
        0 if clip in COMPLETES or (looks and rank == 0) else 6 for rank in range(size)
    ]


@pytest.mark.parametrize(
    "env", [{}, {"HVD_ORDER_AGREEMENT": "negotiated"}, {"HVD_ORDER_AGREEMENT": "planned"}]
)
def test_every_agreement_and_trials(two_ranks: RankPool, env: dict[str, str]) -> None:
    for ours, alone in two_ranks.run(
        body_train, "clip_grad_norm_", {**env, "HVD_ORDER_SPLIT": "always"}
    ):
        torch.testing.assert_close(ours["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
        assert ours["deferred"] == 6


# ---- loss scaling, 16 bits --------------------------------------------------------------------


def train_scaled(distributed: bool, dtype: str, compression: str) -> dict[str, Any]:
    """A GradScaler that meets an infinite gradient in step 4."""
    model = network(getattr(torch, dtype))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if distributed:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, compression),
        )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    mine = slice(hvd.rank(), None, hvd.size()) if distributed else slice(None)
    scales, norms = [], []
    for step in range(STEPS):
        x, y = (each.to(getattr(torch, dtype)) for each in batch(step))
        if step == 4:
            y[-1, 0] = float("inf")  # of the last rank
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(x[mine]), y[mine])).backward()
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {
        "scales": scales,
        "norms": torch.tensor(norms),
        "weights": torch.cat([p.detach().float().flatten() for p in model.parameters()]),
        "deferred": optimizer.overlap_report().deferred_parameters if distributed else 0,
    }


def body_scaled(dtype: str, compression: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with new_job(SPLIT):
        return train_scaled(True, dtype, compression), train_scaled(False, dtype, compression)


@pytest.mark.parametrize(
    ("dtype", "compression", "tolerance"),
    [("float32", "none", 1e-5), ("bfloat16", "none", 3e-2), ("float32", "bf16", 3e-2)],
)
def test_loss_scaling(
    three_ranks: RankPool, dtype: str, compression: str, tolerance: float
) -> None:
    results = three_ranks.run(body_scaled, dtype, compression)
    for ours, alone in results:
        assert ours["scales"] == alone["scales"]
        assert ours["scales"][4] < ours["scales"][3]  # a step was left out
        assert torch.equal(ours["weights"], results[0][0]["weights"])
        torch.testing.assert_close(ours["weights"], alone["weights"], rtol=0, atol=tolerance)
        torch.testing.assert_close(
            ours["norms"], alone["norms"], rtol=tolerance, atol=tolerance, equal_nan=True
        )
        assert ours["deferred"] == 6


# ---- unusual steps ----------------------------------------------------------------------------


def unusual(kind: str, distributed: bool) -> Tensor:
    model = network()
    passes = 2 if kind == "accumulation" else 1
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if distributed:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes
        )
    ranks, rank = (hvd.size(), hvd.rank()) if distributed else (1, 0)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=kind != "zeros")
        for part in range(passes):
            x, y = batch(passes * step + part)
            loss = nn.functional.mse_loss(model(x[rank::ranks]), y[rank::ranks])
            if kind == "unused":  # the last layer's bias has no gradient anywhere
                loss = nn.functional.mse_loss(model[:4](x[rank::ranks])[:, :3], y[rank::ranks])
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if kind in ("skipped", "zeros") and step % 3 == 1:
            continue
        if kind == "cleared" and step % 3 == 1:
            model.zero_grad()  # not by the optimizer
            continue
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def body_unusual(kind: str) -> tuple[Tensor, Tensor]:
    with new_job(SPLIT):
        return unusual(kind, distributed=True), unusual(kind, distributed=False)


@pytest.mark.parametrize("kind", ["skipped", "zeros", "cleared", "accumulation", "unused"])
def test_unusual_steps(three_ranks: RankPool, kind: str) -> None:
    results = three_ranks.run(body_unusual, kind)
    for ours, alone in results:
        assert torch.equal(ours, results[0][0])
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)


def body_copied() -> list[tuple[Tensor, Tensor, Tensor]]:
    with new_job(SPLIT):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        copies = []
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            gradient = gradients_of(model)[step % 4]
            as_bytes = io.BytesIO()
            if step % 2:
                torch.save(gradient, as_bytes)
                copied = torch.load(io.BytesIO(as_bytes.getvalue()))
            else:
                copied = copy.deepcopy(gradient)
            assert type(copied) is Tensor
            gradients_of(model)[0].mul_(2.0)  # one that is complete by now
            copies.append((copied, gradient.detach().clone(), gradients_of(model)[0].clone()))
            optimizer.step()
        return copies


def test_a_clipped_gradient_can_be_copied(two_ranks: RankPool) -> None:
    for copies in two_ranks.run(body_copied):
        for step, (copied, gradient, first) in enumerate(copies):
            assert torch.equal(2 * copied if step % 4 == 0 else copied, gradient)
            assert first.abs().sum() > 0


def body_backward_again() -> str:
    with new_job(SPLIT):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(AssertionError) as raised:
            nn.functional.mse_loss(model(x), y).backward()
        return str(raised.value)


def test_gradients_on_their_way_take_no_more(two_ranks: RankPool) -> None:
    for text in two_ranks.run(body_backward_again):
        assert "more than backward_passes_per_step times before call to step()" in text


# ---- the choice -------------------------------------------------------------------------------


def body_choice(clip: str | None, env: dict[str, str]) -> tuple[bool, str]:
    with new_job({"HVD_ORDER_TUNE": "0", **env}):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        for step in range(5):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if clip == "elements":
                assert all(gradient.isfinite().all() for gradient in gradients_of(model))
            elif clip is not None:
                CLIPS[clip](model, optimizer)
            optimizer.step()
        from hvd_order.c10d.engine.engine_host import running_host

        host = running_host()
        assert host is not None
        return host.slice_settings.split, str(optimizer.overlap_report())


@pytest.mark.parametrize(
    ("clip", "env", "split", "says"),
    [
        ("clip_grad_norm_", {}, True, "all 6 parameters"),
        (None, {}, False, "all 6 parameters"),
        ("value", {}, False, "all 6 parameters"),
        ("elements", {}, False, "elements of gradients were read before step()"),
        ("clip_grad_norm_", {"HVD_ORDER_SPLIT": "never"}, False, "HVD_ORDER_SPLIT=never"),
        (None, {"HVD_ORDER_SPLIT": "always"}, True, "all 6 parameters"),
    ],
)
def test_split_where_norms_are_read(
    two_ranks: RankPool, clip: str | None, env: dict[str, str], split: bool, says: str
) -> None:
    for chosen, report in two_ranks.run(body_choice, clip, env):
        assert chosen == split
        assert says in report


# ---- a rank that dies -------------------------------------------------------------------------


def test_a_rank_dies_between_the_halves() -> None:
    program = dies_between_the_halves(sharded=False)
    env = {"HVD_ORDER_SPLIT": "always", "HVD_ORDER_TIMEOUT": "20"}
    with start_script(3, program, env=env) as script:
        script.wait_for_output(1, "between the halves")
        script.kill(1)
        ended = script.wait(timeout=40)
    assert ended[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ended[rank].returncode == 3, ended[rank].stderr
        assert "raised PeerLost: rank 1 is gone" in ended[rank].stdout


def body_process_set() -> tuple[Tensor, Tensor, Tensor, bool] | None:
    with new_job(SPLIT):
        pair = hvd.add_process_set([0, 2])
        if not pair.included():
            return None
        model, alone = network(), network()
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            named_parameters=model.named_parameters(),
            process_set=pair,
        )
        plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        norms = []
        for step in range(STEPS):
            x, y = batch(step)
            mine = slice(pair.rank(), None, pair.size())
            for each, of, rows in ((optimizer, model, mine), (plain, alone, slice(None))):
                each.zero_grad()
                nn.functional.mse_loss(of(x[rows]), y[rows]).backward()
                norms.append(nn.utils.clip_grad_norm_(of.parameters(), 0.1).detach())
                each.step()
        split = optimizer._hvd_exchange.host.slice_settings.split
        weights = [
            torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, alone)
        ]
        return weights[0], weights[1], torch.stack(norms).view(STEPS, 2), split


def test_a_process_set_splits_its_own_sums(three_ranks: RankPool) -> None:
    first, outside, second = three_ranks.run(body_process_set)
    assert outside is None
    assert [first[3], second[3]] == [True, True]
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[0], first[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first[2][:, 0], first[2][:, 1], rtol=1e-5, atol=1e-6)
