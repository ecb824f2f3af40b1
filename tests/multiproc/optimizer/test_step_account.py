"""``optimizer.stats()`` and the messages about slow ranks, on real ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.jobs import new_job
from helpers.logged import logged
from helpers.ranks import RankFactory, RankPool
from torch import Tensor, nn

import hvd_order.torch as hvd
from hvd_order.base.account.step_stats import StepStats

LAYERS, PASS_S = 6, 0.01  # of each layer, forward as well as backward
MORE_S = 0.15  # of the slow rank


class Takes(torch.autograd.Function):
    """The identity, whose backward pass takes so many seconds."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return grads[0], None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(LAYERS))
        self.late: dict[int, float] = {}  # by layer, seconds more of its backward pass

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            y = layer(x)
            time.sleep(PASS_S)
            x = torch.tanh(
                Takes.apply(  # type: ignore[no-untyped-call]
                    y, PASS_S + self.late.get(number, 0.0)
                )
            )
        return x


@dataclass
class Seen:
    messages: list[list[str]]  # in each part
    stats: list[StepStats]  # after each part
    took_s: list[float]  # a step of each part


def body_parts() -> Seen:
    with new_job({"HVD_ORDER_SLICE_BYTES": "65536"}):  # a layer each
        return parts()


def parts() -> Seen:
    """Healthy steps, then a slow backward pass on rank 1, then none, then a slow loader on rank 2,
    then one late layer on rank 1.
    """
    torch.manual_seed(0)
    model = Model()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    whole = dict.fromkeys(range(LAYERS), MORE_S / LAYERS)
    parts = [
        (20, {}, 0.0),
        (40, whole if hvd.rank() == 1 else {}, 0.0),
        (40, {}, 0.0),
        (40, {}, MORE_S if hvd.rank() == 2 else 0.0),
        (40, {3: MORE_S} if hvd.rank() == 1 else {}, 0.0),
    ]
    seen = Seen([], [], [])
    for steps, late, loader_s in parts:
        with logged(slow_ranks=True) as messages:
            model.late = late
            begin = time.monotonic()
            for _ in range(steps):
                time.sleep(loader_s)
                optimizer.zero_grad()
                model(torch.ones(4, 128)).square().sum().backward()
                optimizer.step()
            seen.took_s.append((time.monotonic() - begin) / steps)
            seen.stats.append(optimizer.stats())
            seen.messages.append(messages)
    return seen


def test_who_is_slow_and_why(ranks: RankFactory) -> None:
    of_ranks = ranks(3).run(body_parts, timeout=180)
    stats = of_ranks[0].stats
    for seen in of_ranks:
        for part in seen.stats[1:]:
            parts = part.compute_s + part.exposed_s + part.update_s + part.host_s
            assert parts == pytest.approx(part.step_s)
    # The machine may be busy and slow other ranks as well, at other times: only what was done here
    # is asked for.
    slow = {1: (1, "backward pass"), 3: (2, "loader"), 4: (1, "backward pass")}
    for part, (rank, cause) in slow.items():
        assert (stats[part].slow_rank, stats[part].slow_cause) == (rank, cause), part
        said = [each for each in of_ranks[0].messages[part] if "holds up" in each]
        assert any(f"rank {rank} on host" in each and cause in each for each in said), said
    assert (stats[2].slow_rank, stats[2].slow_cause) != slow[1]
    ended = [each for each in of_ranks[0].messages[2] if "no longer" in each]
    assert any("rank 1 on host" in each for each in ended), ended
    assert "layers.3" in stats[4].slow_detail
    assert any("layers.3" in each for each in of_ranks[0].messages[4])
    assert not any("hold" in each for part in of_ranks[1].messages for each in part)
    for part in (1, 3, 4):
        # Most of the sleep: what delays rank 0 meanwhile on a busy machine, it need not wait for.
        assert MORE_S / 2 < stats[part].slow_s < of_ranks[0].took_s[part]
        assert stats[part].late_s > MORE_S / 2
        assert stats[part].without_s < of_ranks[0].took_s[part] - MORE_S / 2
    assert stats[3].loader_s < MORE_S / 2 < of_ranks[2].stats[3].loader_s


def body_line() -> tuple[list[str], StepStats]:
    with new_job({"HVD_ORDER_REPORT": "10"}):
        weight = nn.Parameter(torch.zeros(8))
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), [("w", weight)]
        )
        with logged("hvd_order.report") as lines:
            for _ in range(25):
                weight.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.flush()
        return lines, optimizer.stats()


def test_a_line_every_so_many_steps(two_ranks: RankPool) -> None:
    (lines, stats), (nothing, _) = two_ranks.run(body_line)
    assert lines
    assert lines[0].startswith("step 10: ")
    assert "compute" in lines[0]
    assert nothing == []
    assert stats.steps == 25
    assert stats.as_dict()["wire_bytes"] >= 32
    assert all(isinstance(value, float) for value in stats.as_dict().values())


def body_leaves(left: Path) -> float:
    with new_job({"HVD_ORDER_SLICE_BYTES": "65536"}):  # no trials, for which rank 0 would wait
        weight = train_until_the_ranks_compare(left)
        if hvd.rank() == 0:
            hvd.shutdown()
            left.touch()
        return weight


def train_until_the_ranks_compare(left: Path) -> float:
    """Rank 1 takes the last step after rank 0 has dropped its optimizer and left."""
    weight = nn.Parameter(torch.zeros(8))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("w", weight)])
    for step in range(10):
        optimizer.zero_grad()
        weight.sum().backward()
        deadline = time.monotonic() + 20
        while step == 9 and hvd.rank() == 1 and not left.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        optimizer.step()
    return float(weight.detach()[0])


def test_a_rank_may_leave_before_the_others_have_compared_their_last_step(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    for weight in two_ranks.run(body_leaves, tmp_path / "left"):
        assert weight == pytest.approx(-1.0)
