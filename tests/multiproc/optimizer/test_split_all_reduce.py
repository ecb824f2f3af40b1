"""Clipping and unscaling while sums are on their way: results, overlap, faults."""

from __future__ import annotations

import copy
import functools
import io
import math
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.jobs import SMALL, dies_between_the_halves, new_job
from helpers.ranks import RankPool, start_script
from torch import Tensor, nn

import hvd_order.torch as hvd

STEPS = 8
ROWS = 12  # divided by 2, 3 and 4 ranks
Clip = Callable[[nn.Module, torch.optim.Optimizer], Any]
SPLIT = {"HVD_ORDER_DEBUG": "split", **SMALL}


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


def by_method(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """The method of our optimizers, with a limit that changes nothing and with one that does."""
    torchs = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    clip: Callable[[float], Tensor] = getattr(optimizer, "clip_grad_norm_", torchs)
    clip(1000.0)
    return clip(0.1)


def infinity_norm(model: nn.Module, _: torch.optim.Optimizer) -> Tensor:
    return nn.utils.clip_grad_norm_(
        model.parameters(), 0.02, norm_type=math.inf, error_if_nonfinite=True
    )


def infinity_by_hand(model: nn.Module, _: torch.optim.Optimizer) -> float:
    norm = max(
        *(gradient.norm(math.inf).item() for gradient in gradients_of(model)),
        *(torch.linalg.vector_norm(each, math.inf).item() for each in gradients_of(model)),
        *(each.item() for each in torch._foreach_norm(gradients_of(model), math.inf)),
    )
    for gradient in gradients_of(model):
        gradient.div_(max(norm / 0.02, 1.0))
    return norm


def both_norms(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """The infinity norm of gradients that are clipped by the other one, and clipped again."""
    torch_norm(model, optimizer)
    infinity_norm(model, optimizer)
    return nn.utils.get_total_norm(gradients_of(model), norm_type=math.inf)


def first_rank_looks_at_infinity(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """One rank completes all gradients once there are maxima; until then its norm would not show
    that it reads one.
    """
    exchange = getattr(optimizer, "_hvd_exchange", None)
    is_split = exchange is not None and exchange._model.has_norms(math.inf)
    if hvd.rank() == 0 and is_split:
        assert gradients_of(model)[0][0].abs().sum() > 0
    return infinity_norm(model, optimizer)


def first_rank_logs_infinity(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """One rank alone reads an infinity norm: there are no maxima, and it must not be needed."""
    if hvd.rank() == 0:
        assert nn.utils.get_total_norm(gradients_of(model), norm_type=math.inf) > 0
    return torch_norm(model, optimizer)


CLIPS: dict[str, Clip] = {
    "clip_grad_norm_": torch_norm,
    "method": by_method,
    "by hand": by_hand,
    "lists": by_lists,
    "twice": twice,
    "value": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.003),
    "infinity norm": infinity_norm,
    "infinity by hand": infinity_by_hand,
    "both norms": both_norms,
    "norm of order 1": lambda model, _: nn.utils.clip_grad_norm_(
        model.parameters(), 0.5, norm_type=1.0
    ),
    "value, then norm": value_then_norm,
    "rank 0 looks": first_rank_looks,
    "rank 0 looks, infinity": first_rank_looks_at_infinity,
    "rank 0 logs infinity": first_rank_logs_infinity,
}
COMPLETES = {"norm of order 1", "value, then norm"}  # before step(): nothing is left to overlap


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


@pytest.mark.parametrize("clip", CLIPS)
def test_equals_one_process(three_ranks: RankPool, clip: str) -> None:
    results = three_ranks.run(body_train, clip, SPLIT)
    for ours, alone in results:
        assert torch.equal(ours["weights"], results[0][0]["weights"])
        assert torch.equal(ours["answers"], results[0][0]["answers"])
        torch.testing.assert_close(ours["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours["answers"], alone["answers"])
    deferred = [ours["deferred"] for ours, _ in results]
    looks = clip.startswith("rank 0")
    assert deferred == [0 if clip in COMPLETES or (looks and rank == 0) else 6 for rank in range(3)]


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "infinity norm"])
@pytest.mark.parametrize(
    "env", [{}, {"HVD_ORDER_AGREEMENT": "negotiated"}, {"HVD_ORDER_AGREEMENT": "planned"}]
)
def test_every_agreement_and_trials(two_ranks: RankPool, clip: str, env: dict[str, str]) -> None:
    for ours, alone in two_ranks.run(body_train, clip, {**env, "HVD_ORDER_DEBUG": "split"}):
        torch.testing.assert_close(ours["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
        assert ours["deferred"] == 6


# ---- infinity norms are exact, also of what is not finite ---------------------------------------


def body_exact(dtype: str, compression: str, predivide: float) -> list[bool]:
    """Compares norms, before and after two changes, with those of the elements that arrive."""
    with new_job(SPLIT):
        model = network(getattr(torch, dtype))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, compression),
            gradient_predivide_factor=predivide,
        )
        equal = []
        for step in range(STEPS):
            x, y = (
                each.to(getattr(torch, dtype))[hvd.rank() :: hvd.size()] for each in batch(step)
            )
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            kind = type(gradients_of(model)[0])
            norms = torch._foreach_norm(gradients_of(model), math.inf)
            if step % 2:
                for gradient in gradients_of(model):
                    gradient.mul_(-0.7).div_(torch.tensor(1.3))
                norms = [each.norm(math.inf) for each in gradients_of(model)]
            if step > 2:
                assert kind is not Tensor
                assert all(type(each) is kind for each in gradients_of(model))
            of_elements = [each.detach().abs().max() for each in gradients_of(model)]
            equal.append(all(map(torch.equal, norms, of_elements)))
            optimizer.step()
        return equal


@pytest.mark.parametrize(
    ("dtype", "compression", "predivide"),
    [
        ("float32", "none", 1.0),
        ("float32", "bf16", 1.7),
        ("float64", "none", 1.0),
        ("bfloat16", "none", 1.7),
        ("float16", "none", 1.0),
    ],
)
def test_an_infinity_norm_is_that_of_the_elements(
    three_ranks: RankPool, dtype: str, compression: str, predivide: float
) -> None:
    for equal in three_ranks.run(body_exact, dtype, compression, predivide):
        assert equal == [True] * STEPS


def factors(first: float) -> Tensor:
    found = torch.full((51, 37), 1e4)
    found[0, 0] = first
    return found


def body_not_finite(value: float) -> tuple[list[float], float, str, int]:
    with new_job(SPLIT):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters()
        )
        norms, of_slices, text = [], [], ""
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(2, 37)).sum().backward()
            if step == 5:  # once more, with another gradient on the last rank
                optimizer.step()
                optimizer.zero_grad()
                of_last = value if hvd.rank() == hvd.size() - 1 else 1.0
                loss = (model[4].bias * torch.tensor([1.0, of_last, 1.0])).sum()
                # Of several slices, the first of which has the value.
                loss = loss + (model[0].weight * factors(of_last)).sum()
                loss.backward()
            norms.append(model[4].bias.grad.norm(math.inf).item())
            of_slices.append(model[0].weight.grad.norm(math.inf).item())
            try:
                infinity_norm(model, optimizer)
            except RuntimeError as error:
                text = str(error)
                continue  # a step without an update
            optimizer.step()
        return norms, of_slices[5], text, optimizer.overlap_report().deferred_parameters


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_what_is_not_finite(three_ranks: RankPool, value: float) -> None:
    for norms, of_slices, text, deferred in three_ranks.run(body_not_finite, value):
        wanted = [2.0] * STEPS
        wanted[5] = abs(value)
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(wanted), equal_nan=True)
        assert of_slices == abs(value) or (math.isnan(of_slices) and math.isnan(value))
        assert "total norm of order inf for gradients from `parameters` is non-finite" in text
        assert deferred == 6


# ---- loss scaling, 16 bits --------------------------------------------------------------------


def train_scaled(distributed: bool, dtype: str, compression: str, order: float) -> dict[str, Any]:
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
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=order)))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {
        "scales": scales,
        "norms": torch.tensor(norms),
        "weights": torch.cat([p.detach().float().flatten() for p in model.parameters()]),
        "deferred": optimizer.overlap_report().deferred_parameters if distributed else 0,
    }


def body_scaled(
    dtype: str, compression: str, order: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    with new_job(SPLIT):
        alone = train_scaled(False, dtype, compression, order)
        return train_scaled(True, dtype, compression, order), alone


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize(
    ("dtype", "compression", "tolerance"),
    [("float32", "none", 1e-5), ("bfloat16", "none", 3e-2), ("float32", "bf16", 3e-2)],
)
def test_loss_scaling(
    three_ranks: RankPool, dtype: str, compression: str, tolerance: float, order: float
) -> None:
    results = three_ranks.run(body_scaled, dtype, compression, order)
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


def unusual(kind: str, distributed: bool, order: float) -> Tensor:
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
        nn.utils.clip_grad_norm_(model.parameters(), 0.1 if order == 2 else 0.02, norm_type=order)
        if kind in ("skipped", "zeros") and step % 3 == 1:
            continue
        if kind == "cleared" and step % 3 == 1:
            model.zero_grad()  # not by the optimizer
            continue
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def body_unusual(kind: str, order: float) -> tuple[Tensor, Tensor]:
    with new_job(SPLIT):
        return unusual(kind, True, order), unusual(kind, False, order)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("kind", ["skipped", "zeros", "cleared", "accumulation", "unused"])
def test_unusual_steps(three_ranks: RankPool, kind: str, order: float) -> None:
    results = three_ranks.run(body_unusual, kind, order)
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
        with pytest.raises(RuntimeError) as raised:
            nn.functional.mse_loss(model(x), y).backward()
        return str(raised.value)


def test_gradients_on_their_way_take_no_more(two_ranks: RankPool) -> None:
    for text in two_ranks.run(body_backward_again):
        assert "more than backward_passes_per_step times before call to step()" in text
        assert "call optimizer.step() or optimizer.zero_grad() before the next backward()" in text


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
        from hvd_order.engine.engine_host import running_host

        host = running_host()
        assert host is not None
        return host.slice_settings.split, str(optimizer.overlap_report())


@pytest.mark.parametrize(
    ("clip", "env", "split", "says"),
    [
        ("clip_grad_norm_", {}, True, "all 6 parameters"),
        ("infinity norm", {}, True, "all 6 parameters"),
        ("infinity norm", {"HVD_ORDER_SPLIT": "never"}, False, "HVD_ORDER_SPLIT=never"),
        ("norm of order 1", {}, False, "elements of gradients were read before step()"),
        (None, {}, False, "all 6 parameters"),
        ("value", {}, False, "all 6 parameters"),
        ("elements", {}, False, "elements of gradients were read before step()"),
        ("clip_grad_norm_", {"HVD_ORDER_SPLIT": "never"}, False, "HVD_ORDER_SPLIT=never"),
        (None, {"HVD_ORDER_DEBUG": "split"}, True, "all 6 parameters"),
    ],
)
def test_split_where_norms_are_read(
    two_ranks: RankPool, clip: str | None, env: dict[str, str], split: bool, says: str
) -> None:
    for chosen, report in two_ranks.run(body_choice, clip, env):
        assert chosen == split
        assert says in report


def body_maxima(
    most_bytes: int, clips: list[str], env: dict[str, str]
) -> tuple[bool, list[bool], str]:
    """Whether all-reduces are split, whether there are maxima in each step, and the report.

    Args:
        most_bytes: limit of the maxima.
        clips: by step, for each rank.
    """
    from hvd_order.torch.sums import registered_model

    with pytest.MonkeyPatch.context() as patch, new_job({"HVD_ORDER_TUNE": "0", **env}):
        patch.setattr(registered_model, "MOST_MAXIMA_BYTES", most_bytes)
        model = network()
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        registered = optimizer._hvd_exchange._model
        maxima = []
        for step, clip in enumerate(clips):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            CLIPS[clip](model, optimizer)
            maxima.append(registered.has_norms(math.inf))
            optimizer.step()
        return registered.is_split, maxima, str(optimizer.overlap_report())


ALWAYS = {"HVD_ORDER_DEBUG": "split"}
NONE, ALL = 5 * [False], [False, False, True, True, True]  # the first two steps are whole
LATE = [*4 * ["clip_grad_norm_"], "infinity norm"]
FEW = 6 * 2 * 8  # six gradients on two ranks


@pytest.mark.parametrize(
    ("most_bytes", "clips", "env", "split", "maxima", "says"),
    [
        (FEW, 5 * ["infinity norm"], {}, True, ALL, "all 6 parameters"),
        (FEW, 5 * ["clip_grad_norm_"], {}, True, NONE, "all 6 parameters"),
        (FEW, 5 * ["clip_grad_norm_"], ALWAYS, True, NONE, "all 6 parameters"),
        (FEW - 1, 5 * ["infinity norm"], {}, False, NONE, "with 6 gradients and 2 ranks its par"),
        (FEW - 1, 5 * ["infinity norm"], ALWAYS, True, NONE, "with 6 gradients and 2 ranks its"),
        (FEW - 1, 5 * ["both norms"], {}, True, NONE, "with 6 gradients and 2 ranks its parts"),
        # Behind another norm, which completes whole sums, they are first seen in the third step.
        (FEW, 5 * ["both norms"], {}, True, [*4 * [False], True], "all 6 parameters"),
        (FEW, LATE, {}, True, NONE, "none had been read on every rank when slices were last cut"),
        # Norms that are read now and then: here in the first step alone.
        (FEW, ["infinity norm", *4 * ["clip_grad_norm_"]], {}, True, ALL, "all 6 parameters"),
    ],
)
def test_maxima_where_infinity_norms_are_read(
    two_ranks: RankPool, most_bytes: int, clips: list[str], env: dict[str, str], split: bool,
    maxima: list[bool], says: str,
) -> None:  # fmt: skip
    for is_split, had, report in two_ranks.run(body_maxima, most_bytes, clips, env):
        assert is_split == split
        assert had == maxima
        assert says in report


# ---- a rank that dies -------------------------------------------------------------------------


def test_a_rank_dies_between_the_halves() -> None:
    program = dies_between_the_halves(sharded=False)
    env = {"HVD_ORDER_DEBUG": "split", "HVD_ORDER_TIMEOUT": "20"}
    with start_script(3, program, env=env) as script:
        script.wait_for_output(1, "between the halves")
        script.kill(1)
        ended = script.wait(timeout=40)
    assert ended[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ended[rank].returncode == 3, ended[rank].stderr
        assert "raised PeerLost: rank 1 is gone" in ended[rank].stdout


def body_process_set(order: float) -> tuple[Tensor, Tensor, Tensor, bool] | None:
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
                norms.append(nn.utils.clip_grad_norm_(of.parameters(), 0.1, order).detach())
                each.step()
        split = optimizer._hvd_exchange._model.has_norms(order)
        weights = [
            torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, alone)
        ]
        return weights[0], weights[1], torch.stack(norms).view(STEPS, 2), split


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_process_set_splits_its_own_sums(three_ranks: RankPool, order: float) -> None:
    first, outside, second = three_ranks.run(body_process_set, order)
    assert outside is None
    assert [first[3], second[3]] == [True, True]
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[0], first[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first[2][:, 0], first[2][:, 1], rtol=1e-5, atol=1e-6)
