"""Clipping and unscaling while sums are on their way: results, overlap, faults."""

from __future__ import annotations

import copy
import functools
import io
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.jobs import SMALL, new_job
from helpers.on_ranks import on_ranks
from helpers.ranks import RankPool, start_script
from torch import Tensor, nn

import hvd_order.torch as hvd
from hvd_order.engine.engine_host import engine_host
from hvd_order.torch.sums import registered_model

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


def wrapped(model: nn.Module, lr: float = 0.1, **how: Any) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), **how
    )


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


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
    "any infinity norm": lambda model, _: nn.utils.clip_grad_norm_(  # also if it is not finite
        model.parameters(), 0.1, norm_type=math.inf
    ),
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


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        kind: of an unusual loop, or "".
        compression: where it or the dtype is not "none" and "float32", rounding differs.
        scaled: by a GradScaler that meets an infinite gradient in step 4.
    """

    clip: str
    kind: str = ""
    dtype: str = "float32"
    compression: str = "none"
    scaled: bool = False

    @property
    def tolerance(self) -> dict[str, float]:
        rounds = self.dtype != "float32" or self.compression != "none"
        return {"rtol": 3e-2, "atol": 3e-2} if rounds else {"rtol": 1e-5, "atol": 1e-6}


ORDERS = ("clip_grad_norm_", "infinity norm")
CASES = {
    **{clip: Case(clip) for clip in CLIPS},
    **{
        f"{kind}, {clip}": Case(clip, kind)
        for kind in ("skipped", "zeros", "cleared", "accumulation", "unused")
        for clip in ORDERS
    },
    **{
        f"scaled {dtype} {compression}, {clip}": Case(clip, "", dtype, compression, scaled=True)
        for dtype, compression in (("float32", "none"), ("bfloat16", "none"), ("float32", "bf16"))
        for clip in ("clip_grad_norm_", "any infinity norm")
    },
}


def train(case: Case, ranks: hvd.ProcessSet | None) -> dict[str, Any]:
    """On some ranks, or in one process."""
    dtype = getattr(torch, case.dtype)
    model = network(dtype)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * (not case.scaled))
    passes = 2 if case.kind == "accumulation" else 1
    mine = slice(None)
    if ranks is not None:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), backward_passes_per_step=passes,
            compression=getattr(hvd.Compression, case.compression), process_set=ranks,
        )  # fmt: skip
        mine = slice(ranks.rank(), None, ranks.size())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=case.scaled)
    answers, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=case.kind != "zeros")
        for part in range(passes):
            x, y = (each.to(dtype) for each in batch(passes * step + part))
            if case.scaled and step == 4:
                y[-1, 0] = math.inf  # of the last rank
            # Where the last layer is not used, it has no gradient anywhere.
            found = model[:4](x[mine])[:, :3] if case.kind == "unused" else model(x[mine])
            scaler.scale(nn.functional.mse_loss(found, y[mine])).backward()
        scaler.unscale_(optimizer)
        answer = CLIPS[case.clip](model, optimizer)
        answers.append(0.0 if answer is None else float(answer))
        if step % 3 == 1 and case.kind in ("skipped", "zeros", "cleared"):
            if case.kind == "cleared":
                model.zero_grad()  # not by the optimizer
            continue
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    found = {"answers": torch.tensor(answers), "weights": weights_of(model), "scales": scales}
    if ranks is not None:
        found["deferred"] = optimizer.overlap_report().deferred_parameters
        found["has_norms"] = optimizer._hvd_exchange._model.has_norms(
            math.inf if "infinity" in case.clip else 2.0
        )
    return found


def body_train(
    name: str, env: dict[str, str], members: list[int] | None = None
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    with new_job(env):
        ranks = hvd.add_process_set(members) if members else hvd.global_process_set
        if not ranks.included():
            return None
        return train(CASES[name], ranks), train(CASES[name], None)


def check(results: list[tuple[dict[str, Any], dict[str, Any]]], case: Case) -> None:
    first, _ = results[0]
    for ours, alone in results:
        assert ours["scales"] == alone["scales"]
        for key in ("weights", "answers"):
            assert torch.equal(ours[key].nan_to_num(), first[key].nan_to_num())
            torch.testing.assert_close(ours[key], alone[key], **case.tolerance, equal_nan=True)
        if case.scaled:
            assert ours["scales"][4] < ours["scales"][3]  # a step was left out


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(three_ranks: RankPool, name: str) -> None:
    case = CASES[name]
    results = three_ranks.run(body_train, name, SPLIT)
    check(results, case)
    looks = name.startswith("rank 0")
    for rank, (ours, _) in enumerate(results):
        completes = case.clip in COMPLETES or (looks and rank == 0)
        assert case.kind or ours["deferred"] == (0 if completes else 6)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(
    "env", [{}, {"HVD_ORDER_AGREEMENT": "negotiated"}, {"HVD_ORDER_AGREEMENT": "planned"}]
)
def test_every_agreement_and_trials(two_ranks: RankPool, name: str, env: dict[str, str]) -> None:
    results = two_ranks.run(body_train, name, {**env, "HVD_ORDER_DEBUG": "split"})
    check(results, CASES[name])
    assert [ours["deferred"] for ours, _ in results] == [6, 6]


@pytest.mark.parametrize("name", ORDERS)
def test_a_process_set_splits_its_own_sums(three_ranks: RankPool, name: str) -> None:
    first, outside, second = three_ranks.run(body_train, name, SPLIT, [0, 2])
    assert outside is None
    check([first, second], CASES[name])
    assert [first[0]["has_norms"], second[0]["has_norms"]] == [True, True]


# ---- infinity norms are exact, also of what is not finite ---------------------------------------


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
@on_ranks(3)
def test_an_infinity_norm_is_that_of_the_elements(
    dtype: str, compression: str, predivide: float
) -> None:
    """Compares norms, before and after two changes, with those of the elements that arrive."""
    with new_job(SPLIT):
        model = network(getattr(torch, dtype))
        optimizer = wrapped(
            model,
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
    assert equal == [True] * STEPS


def factors(first: float) -> Tensor:
    found = torch.full((51, 37), 1e4)
    found[0, 0] = first
    return found


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@on_ranks(3)
def test_what_is_not_finite(value: float) -> None:
    with new_job(SPLIT):
        model = network()
        optimizer = wrapped(model, lr=0.0)
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
        of_slices = of_slices[5]
        deferred = optimizer.overlap_report().deferred_parameters
    wanted = [2.0] * STEPS
    wanted[5] = abs(value)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(wanted), equal_nan=True)
    assert of_slices == abs(value) or (math.isnan(of_slices) and math.isnan(value))
    assert "total norm of order inf for gradients from `parameters` is non-finite" in text
    assert deferred == 6


# ---- uses of clipped gradients ----------------------------------------------------------------


@on_ranks(2)
def test_a_clipped_gradient_can_be_copied_and_takes_no_more() -> None:
    """Copies gradients; at the end, what a second backward pass says."""
    with new_job(SPLIT):
        model = network()
        optimizer = wrapped(model)
        copies = []
        for step in range(STEPS + 1):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if step == STEPS:
                break
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
        with pytest.raises(RuntimeError) as raised:
            nn.functional.mse_loss(model(x), y).backward()
        text = str(raised.value)
    for step, (copied, gradient, first) in enumerate(copies):
        assert torch.equal(2 * copied if step % 4 == 0 else copied, gradient)
        assert first.abs().sum() > 0
    assert "more than backward_passes_per_step times before call to step()" in text
    assert "call optimizer.step() or optimizer.zero_grad() before the next backward()" in text


# ---- the choice -------------------------------------------------------------------------------


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
@on_ranks(2)
def test_split_where_norms_are_read(
    clip: str | None, env: dict[str, str], split: bool, says: str
) -> None:
    with new_job({"HVD_ORDER_TUNE": "0", **env}):
        model = network()
        optimizer = wrapped(model)
        for step in range(5):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if clip == "elements":
                assert all(gradient.isfinite().all() for gradient in gradients_of(model))
            elif clip is not None:
                CLIPS[clip](model, optimizer)
            optimizer.step()
        chosen = engine_host().slice_settings.split
        report = str(optimizer.overlap_report())
    assert chosen == split
    assert says in report


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
@on_ranks(2)
def test_maxima_where_infinity_norms_are_read(
    most_bytes: int, clips: list[str], env: dict[str, str], split: bool, maxima: list[bool],
    says: str,
) -> None:  # fmt: skip
    """Whether all-reduces are split, whether there are maxima in each step, and the report.

    Args:
        most_bytes: limit of the maxima.
        clips: by step, for each rank.
    """
    with pytest.MonkeyPatch.context() as patch, new_job({"HVD_ORDER_TUNE": "0", **env}):
        patch.setattr(registered_model, "MOST_MAXIMA_BYTES", most_bytes)
        model = network()
        optimizer = wrapped(model)
        registered = optimizer._hvd_exchange._model
        had = []
        for step, clip in enumerate(clips):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            CLIPS[clip](model, optimizer)
            had.append(registered.has_norms(math.inf))
            optimizer.step()
        assert registered.is_split == split
        assert had == maxima
        assert says in str(optimizer.overlap_report())


# ---- a rank that dies -------------------------------------------------------------------------

# Rank 1 waits between the halves of step 6 to be killed; the others say by which error they end.
DIES = """
import os
import sys
import torch
import hvd_order.torch as hvd

how, rank = sys.argv[1], int(os.environ["RANK"])
if how == "coded":  # ranks 0 and 1 share a host
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="1" if rank == 2 else "2")
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(),
    sharded=how == "sharded",
    compression=hvd.Compression.int8 if how == "coded" else hvd.Compression.none,
)
step = 0
try:
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        step += 1
        if step == 6:
            print("between the halves", flush=True)
            if hvd.rank() == 1:
                sys.stdin.read()  # until the end
        optimizer.step()
except hvd.HorovodInternalError as error:
    print(f"raised {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("how", ["ordinary", "sharded", "coded"])
def test_a_rank_dies_between_the_halves(how: str) -> None:
    env = {"HVD_ORDER_DEBUG": "split", "HVD_ORDER_TIMEOUT": "20"}
    with start_script(3, DIES, how, env=env) as script:
        script.wait_for_output(1, "between the halves")
        script.kill(1)
        ended = script.wait(timeout=40)
    assert ended[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ended[rank].returncode == 3, ended[rank].stderr
        assert "raised PeerLost: rank 1 is gone" in ended[rank].stdout
