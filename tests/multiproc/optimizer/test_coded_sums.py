"""Sums in 8 bits, on real ranks: ``compression=hvd.Compression.int8``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.jobs import SMALL, new_job, on_hosts
from helpers.logged import logged
from helpers.on_ranks import on_ranks
from helpers.oracles.coded_sums import Ranks
from helpers.ranks import RankFactory, RankPool
from torch import Tensor, nn

import hvd_order.torch as hvd
from hvd_order._native import _torch as native
from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.engine.engine_host import engine_host

ROWS, COLUMNS = 40, 70  # the place in the buffer: 2,800 elements, padding, the use flag


def wrapped(parameters: Any, lr: float = 1.0, **how: Any) -> Any:
    how.setdefault("compression", hvd.Compression.int8)
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=lr), named, **how)


def gradient(rank: int, step: int, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> Tensor:
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=numbers) * 10.0 ** (step % 5 - 2)


def body_sums(steps: int, hosts: Sequence[int]) -> list[Tensor]:
    with on_hosts(hosts):
        weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        optimizer = wrapped([weight], op=hvd.Sum)
        sums = []
        for step in range(steps):
            weight.backward(gradient(hvd.rank(), step))
            optimizer.synchronize()
            assert weight.grad is not None
            sums.append(weight.grad.clone())
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        return sums


@pytest.mark.parametrize(
    ("size", "hosts"),
    [(2, []), (3, []), (3, [0, 0, 1]), (3, [0, 1, 0]), (4, [0, 0, 1, 1]), (4, [0, 1, 1, 1])],
)
def test_sums_are_those_of_one_process_with_the_same_codes(
    ranks: RankFactory, size: int, hosts: list[int]
) -> None:
    steps, elements = 12, ROWS * COLUMNS
    place = (elements + 1 + 15) // 16 * 16  # 64 bytes
    shards = [native.shard_of(place, rank, size) for rank in range(size)]
    parts = [slice(begin, begin + length) for begin, length in shards]
    oracle = Ranks(parts, place - 1, hosts or None)
    of_ranks = ranks(size).run(body_sums, steps, hosts)
    for step in range(steps):
        padded = [torch.zeros(place - 1) for _ in range(size)]
        for rank in range(size):
            padded[rank][:elements] = gradient(rank, step).flatten()
        want = oracle.total(padded)[:elements].view(ROWS, COLUMNS)
        for sums in of_ranks:
            assert torch.equal(sums[step], want), step


def body_equal_gradients_that_codes_hold() -> bool:
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = wrapped([weight], op=hvd.Sum)
    codes = torch.randint(-127, 128, (64, 64), generator=torch.Generator().manual_seed(0)).float()
    codes[:, ::4] = 127
    weight.backward(codes / 64)
    optimizer.step()
    return torch.equal(weight.detach(), -hvd.size() * codes / 64)


def test_equal_gradients_that_codes_hold_are_summed_exactly(three_ranks: RankPool) -> None:
    assert three_ranks.run(body_equal_gradients_that_codes_hold) == [True, True, True]


@dataclass
class Account:
    """What has become of a rank's gradients."""

    weights: Tensor
    produced: Tensor  # sum over the steps, float64
    owed: Tensor


SHAPES = [(700, 300), (300, 80), (80,), (90, 700), (5,), (64, 64)]


def train(optimizer: Any, parameters: list[nn.Parameter], step: int) -> Tensor:
    produced = []
    for number, parameter in enumerate(parameters):
        each = gradient(hvd.rank(), step + 100 * number, tuple(parameter.shape))
        (parameter * each).sum().backward()
        produced.append(each.double().flatten())
    optimizer.step()
    optimizer.zero_grad()
    return torch.cat(produced)


@contextmanager
def slow_link(hosts: Sequence[int] = ()) -> Iterator[None]:
    """A job whose engine takes its link for one on which nothing but the bytes counts."""
    with on_hosts(hosts):
        engine_host(0, range(hvd.size()))._link = LinkModel(0.0, 0.0, 1e-6)
        yield


def body_account(steps: int, late: bool, compression: str, hosts: Sequence[int]) -> Account:
    """Weights that are the sum of all gradients, through trials and new registrations."""
    with slow_link(hosts):
        return account(steps, late, getattr(hvd.Compression, compression))


def account(steps: int, late: bool, compression: Any) -> Account:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64).float()) for shape in SHAPES]
    optimizer = wrapped(parameters[: -1 if late else None], op=hvd.Sum, compression=compression)
    produced = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    applied = torch.zeros_like(produced)
    for step in range(steps):
        if late and step == steps // 2:  # the model is registered anew
            optimizer.add_param_group({"params": [parameters[-1]]})
        each = train(optimizer, parameters, step)
        if late and step < steps // 2:
            each[-parameters[-1].numel() :] = 0
            parameters[-1].grad = None
        produced += each
        with torch.no_grad():
            applied += torch.cat([p.double().flatten() for p in parameters])
            for parameter in parameters:
                parameter.zero_()
    of_parameter = {e.parameter: e.residual for e in optimizer._hvd_exchange._table.entries}
    owed = [
        torch.zeros(parameter.numel()) if residual is None else residual.double().flatten()
        for parameter in parameters
        for residual in [of_parameter[parameter]]
    ]
    return Account(applied, produced, torch.cat(owed))


@pytest.mark.parametrize(
    ("late", "compression", "hosts"),
    [
        (False, "int8", []),
        (True, "int8", []),
        (False, "auto", []),
        (False, "bf16_ef", []),
        (True, "int8", [0, 1, 1]),
    ],
)
def test_nothing_is_lost_through_trials_and_new_registrations(
    three_ranks: RankPool, late: bool, compression: str, hosts: list[int]
) -> None:
    accounts = three_ranks.run(body_account, 120, late, compression, hosts)
    for other in accounts[1:]:
        assert torch.equal(other.weights, accounts[0].weights)
    for host in set(hosts):  # one rank of a host sends what its ranks owe
        debts = [a.owed != 0 for a, other in zip(accounts, hosts, strict=True) if other == host]
        assert sum(debts).max() <= 1
    produced = sum(account.produced for account in accounts)
    owed = sum(account.owed for account in accounts)
    error = (accounts[0].weights + produced - owed).abs().max()
    assert error < 2e-3, error  # of 120 sums of up to 300 in float32
    assert owed.abs().max() > (1e-4 if compression == "bf16_ef" else 0.01)  # it would be seen


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compression", ["int8", "auto"])
def test_ranks_stay_equal_over_thousands_of_steps(three_ranks: RankPool, compression: str) -> None:
    accounts = three_ranks.run(body_account, 2_000, True, compression, [0, 0, 1], timeout=500)
    for other in accounts[1:]:
        assert torch.equal(other.weights, accounts[0].weights)
    produced = sum(account.produced for account in accounts)
    error = (accounts[0].weights + produced - sum(account.owed for account in accounts)).abs().max()
    assert error < 0.01, error  # the roundings of 2,000 sums of up to 300 in float32


def body_program(name: str) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(90, 120), nn.ReLU(), nn.Linear(120, 70), nn.Linear(70, 3))
    optimizer = wrapped(list(model.parameters()), lr=0.01, **PROGRAMS[name].how)
    for step in range(12):
        numbers = torch.Generator().manual_seed(10 * step + hvd.rank())
        PROGRAMS[name].step(model, optimizer, torch.randn(8, 90, generator=numbers), step)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain(model: nn.Module, optimizer: Any, x: Tensor, step: int) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def clipped(model: nn.Module, optimizer: Any, x: Tensor, step: int) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def unused(model: nn.Module, optimizer: Any, x: Tensor, step: int) -> None:
    optimizer.zero_grad()
    layers = list(model.children())
    out = layers[1](layers[0](x))
    if (step + hvd.rank()) % 2:
        out = layers[2](out)
    out.square().mean().backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, x: Tensor, step: int) -> None:
    optimizer.zero_grad()
    for part in x.chunk(2):
        model(part).square().mean().backward()
    optimizer.step()


@dataclass
class Program:
    """One way to train; `how`: arguments of DistributedOptimizer."""

    step: Callable[[nn.Module, Any, Tensor, int], None]
    how: dict[str, Any]


PROGRAMS = {
    "plain": Program(plain, {}),
    "clipped": Program(clipped, {}),
    "unused": Program(unused, {}),
    "accumulated": Program(accumulated, {"backward_passes_per_step": 2}),
    "predivided": Program(plain, {"gradient_predivide_factor": 2.0}),
    "sharded": Program(plain, {"sharded": True}),
    "sharded and clipped": Program(clipped, {"sharded": True}),
}


def body_in_small_slices(name: str) -> Tensor:
    """Slices that three ranks do not divide evenly, and some with fewer elements than blocks."""
    with new_job({**SMALL, "HVD_ORDER_TUNE": "0"}):
        return body_program(name)


def body_planned(name: str) -> Tensor:
    """The first plan comes before the link is measured."""
    with new_job({"HVD_ORDER_AGREEMENT": "planned", "HVD_ORDER_TUNE": "0"}):
        return body_program(name)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        *((name, body_program) for name in PROGRAMS),
        ("unused", body_in_small_slices),
        ("clipped", body_planned),
    ],
)
def test_programs_train_alike_on_all_ranks_and_like_without(
    three_ranks: RankPool, name: str, body: Callable[[str], Tensor]
) -> None:
    ours = three_ranks.run(body, name)
    for other in ours[1:]:
        assert torch.equal(other, ours[0])
    exact = three_ranks.run(body_exact, name)[0]
    change = (exact - three_ranks.run(body_start)[0]).norm()
    assert 0 < (ours[0] - exact).norm() < 0.02 * change


def body_exact(name: str) -> Tensor:
    how = PROGRAMS[name].how
    PROGRAMS[name].how = {**how, "compression": hvd.Compression.none}
    try:
        return body_program(name)
    finally:
        PROGRAMS[name].how = how


def body_start() -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(90, 120), nn.ReLU(), nn.Linear(120, 70), nn.Linear(70, 3))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def on_a_fast_link(compression: str) -> Tensor:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = wrapped(parameters, compression=getattr(hvd.Compression, compression))
    for step in range(40):
        train(optimizer, parameters, step)
    assert optimizer.compression_report() == []
    return torch.cat([p.detach().flatten() for p in parameters])


def test_auto_changes_nothing_where_the_link_is_hidden(two_ranks: RankPool) -> None:
    ours = two_ranks.run(body_on_a_fast_link_with, "auto")
    assert torch.equal(ours[0], two_ranks.run(body_on_a_fast_link_with, "none")[0])


def body_sharded_on_a_slow_link() -> tuple[int, Tensor]:
    with slow_link():
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        optimizer = wrapped(parameters, compression=hvd.Compression.auto, sharded=True)
        for step in range(8):
            train(optimizer, parameters, step)
        coded = len(optimizer.compression_report())
        return coded, torch.cat([p.detach().flatten() for p in parameters])


def test_auto_chooses_for_shards_without_trials(two_ranks: RankPool) -> None:
    (coded, ours), (_, theirs) = two_ranks.run(body_sharded_on_a_slow_link)
    assert coded > 0
    assert torch.equal(ours, theirs)


def body_on_a_fast_link_with(compression: str) -> Tensor:
    with new_job({}):
        engine_host(0, range(hvd.size()))._link = LinkModel(0.0, 0.0, 1e-15)
        return on_a_fast_link(compression)


def body_with_others_away(how: str) -> list[float]:
    """Ranks 0 and 2 train alone: as a process set, or because rank 1 has joined."""
    weight = nn.Parameter(torch.zeros(20, 20))
    two = hvd.add_process_set([0, 2]) if how == "process set" else hvd.global_process_set
    optimizer = wrapped([weight], op=hvd.Sum, process_set=two)
    alone = hvd.rank() == 1
    for step in range(4):
        if alone and (how == "process set" or step == 2):
            break
        optimizer.zero_grad()
        weight.backward(torch.full((20, 20), 127 / 64))
        optimizer.step()
    optimizer.flush()
    if how == "join":
        hvd.join()
    else:
        hvd.barrier()
        hvd.remove_process_set(two)
    return [weight.min().item(), weight.max().item()]


@pytest.mark.parametrize(("how", "sum_"), [("process set", 8.0), ("join", 2 * 3.0 + 2 * 2.0)])
def test_ranks_train_while_another_is_away(three_ranks: RankPool, how: str, sum_: float) -> None:
    first, _, last = three_ranks.run(body_with_others_away, how)
    assert first == last == [-sum_ * 127 / 64] * 2  # codes hold these


def body_scaled(bad_rank: int) -> tuple[bool, Tensor, float]:
    """A step whose gradients overflow on one rank, with GradScaler."""
    weight = nn.Parameter(torch.ones(30, 30))
    optimizer = wrapped([weight])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        bad = step == 2 and hvd.rank() == bad_rank
        scaler.scale((weight * (torch.inf if bad else 0.5)).sum()).backward()
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            skipped = torch.equal(before, weight.detach())
    return skipped, weight.detach().clone(), scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks: RankPool) -> None:
    for skipped, weight, scale in two_ranks.run(body_scaled, 1):
        assert skipped
        assert scale == 2.0
        assert torch.allclose(weight, torch.full((30, 30), 1 - 3 * 0.5), atol=0.01)


@on_ranks(2)
def test_kept_and_small_parameters_are_exact() -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((8, 9), (17,), (8, 9))]
    named = list(zip(("router.weight", "bias", "body.weight"), parameters, strict=True))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), named, hvd.Compression.int8(keep=["router"])
    )
    each = [gradient(hvd.rank(), 2, tuple(p.shape)) for p in parameters]
    for parameter, own in zip(parameters, each, strict=True):
        parameter.backward(own)
    optimizer.step()
    exact = [
        torch.equal(
            parameter.detach(),
            -(gradient(0, 2, tuple(parameter.shape)) + gradient(1, 2, tuple(parameter.shape))) / 2,
        )
        for parameter in parameters
    ]
    assert exact == [True, True, False]


@on_ranks(2)
def test_a_model_without_anything_to_encode_is_told_once() -> None:
    flat = nn.Parameter(torch.zeros(1000))
    with logged() as messages:
        optimizer = wrapped([flat])
        for _ in range(4):
            flat.sum().backward()
            optimizer.step()
    found = [text for text in messages if text.startswith("the compression encodes no gradient")]
    assert len(found) == (hvd.rank() == 0)


@on_ranks(2)
def test_what_cannot_be_encoded_is_refused_with_the_cure() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(InvalidUsage, match=r"Compression\.bf16"):
        hvd.allreduce(torch.ones(4), compression=hvd.Compression.int8)
    with pytest.raises(InvalidUsage, match="Adasum"):
        wrapped([weight], op=hvd.Adasum)
    numbers: Any = [3]
    with pytest.raises(ValueError, match="keep"):
        hvd.Compression.int8(keep=numbers)


@on_ranks(2)
def test_a_setting_that_forbids_halves_is_named() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    with new_job({"HVD_ORDER_SPLIT": "never"}), pytest.raises(InvalidUsage) as refused:
        wrapped([weight])
    assert str(refused.value) == (
        "sums of encoded gradients are not possible: HVD_ORDER_SPLIT=never. Use Compression.bf16 "
        "or none"
    )


def body_report() -> tuple[list[Any], list[Any]]:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((40, 64), (64,))]
    optimizer = wrapped(parameters)
    for parameter in parameters:
        parameter.backward(gradient(hvd.rank(), 0, tuple(parameter.shape)))
    optimizer.step()
    report = optimizer.compression_report()
    plain = wrapped([nn.Parameter(torch.zeros(4, 4))], compression=hvd.Compression.none)
    return report, plain.compression_report()


def test_the_report_says_what_is_saved_and_lost(two_ranks: RankPool) -> None:
    for report, plain in two_ranks.run(body_report):
        assert plain == []
        (coded,) = report
        assert (coded.name, coded.format) == ("p0", "int8")
        assert coded.saved_bytes == 4 * 2560 - 2560 - 4 * 10
        assert 0 < coded.relative_error < 0.01
        assert coded.residual_norm > 0


@on_ranks(2)
def test_models_whose_gradients_are_all_sparse_have_nothing_to_encode() -> None:
    for compression in (hvd.Compression.int8, hvd.Compression.auto):
        table = nn.Embedding(10, 4, sparse=True)
        with torch.no_grad():
            table.weight.zero_()
        optimizer = wrapped(list(table.parameters()), compression=compression)
        for _ in range(4):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank()])).sum().backward()
            optimizer.step()
        assert table.weight[:2].tolist() == [[-2.0] * 4] * 2
        assert optimizer.compression_report() == []


def body_outliers(kind: str, compression: str, keep: list[str], steps: int) -> list[str]:
    """The lines about errors in codes, while `p0` has outliers of some kind, and `p1` none."""
    how = getattr(hvd.Compression, compression)
    parameters = [nn.Parameter(torch.zeros(80, 96)) for _ in range(2)]
    with logged() as lines, slow_link():
        optimizer = wrapped(parameters, compression=how(keep=keep))
        for step in range(steps):
            optimizer.zero_grad()
            for number, parameter in enumerate(parameters):
                numbers = torch.Generator().manual_seed(100 * step + 10 * number + hvd.rank())
                grad = torch.randn(80 * 96, generator=numbers)
                if number == 0 and kind != "none":
                    grad[::256] = 1000.0 * (-1) ** (hvd.rank() if kind == "cancel" else 0)
                parameter.backward(grad.view(80, 96))
            optimizer.step()
        optimizer.flush()
    return [line for line in lines if "codes lack" in line]


@pytest.mark.parametrize(
    ("kind", "compression", "keep", "named"),
    [
        ("cancel", "int8", [], True),
        ("cancel", "int8", ["p0"], False),  # travels exactly
        ("cancel", "bf16_ef", [], False),
        ("agree", "int8", [], False),  # they are most of the sum, and its codes hold them
        ("none", "int8", [], False),
    ],
)
def test_a_sum_of_which_codes_lack_much_is_named_once(
    two_ranks: RankPool, kind: str, compression: str, keep: list[str], named: bool
) -> None:
    """Outliers that cancel between ranks: one a block takes the codes of all its neighbours."""
    first, other = two_ranks.run(body_outliers, kind, compression, keep, 40)
    assert other == [], "rank 0 logs"
    assert len(first) == named
    for line in first:
        assert "of 'p0', which" in line
        assert 'keep=["p0"]' in line
        assert int(line.split("codes lack ")[1].split(" %")[0]) > 50


def body_true_error() -> tuple[float, Tensor, Tensor]:
    """What the report says, and what it is about: the residual, and the sum."""
    weight = nn.Parameter(torch.zeros(80, 96))
    optimizer = wrapped([weight], op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        weight.backward(gradient(hvd.rank(), step, (80, 96)))
        optimizer.step()
    optimizer.flush()
    (coded,) = optimizer.compression_report()
    (entry,) = optimizer._hvd_exchange._table.entries
    assert weight.grad is not None
    return coded.relative_error, entry.residual.flatten().clone(), weight.grad.flatten().clone()


def test_the_reported_error_is_that_of_the_sum(three_ranks: RankPool) -> None:
    found = three_ranks.run(body_true_error)
    lack = torch.stack([residual for _, residual, _ in found]).sum(0).norm() / found[0][2].norm()
    for error, *_ in found:
        assert error == pytest.approx(lack.item(), rel=0.3)
