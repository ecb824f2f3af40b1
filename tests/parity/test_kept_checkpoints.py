"""A program that keeps state dicts loses no overlap, and finds there what plain PyTorch has."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.jobs import new_job
from helpers.on_ranks import on_ranks
from random_programs.foreign import copied_by_gloo
from torch import nn

import hvd_order.torch as hvd

WIDTH = 6
DEFERS = {"HVD_ORDER_TUNE": "0"}  # trials of short steps may find that it does not pay
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Program:
    """Trains on equal rows on all ranks, with hvd_order or without, and keeps what it sees."""

    def __init__(self, optimizer: str, distributed: bool) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH).double() for _ in range(3)])
        self.model[2].weight = self.model[1].weight  # twice in state_dict()
        self.optimizer: Any = OPTIMIZERS[optimizer](self.model.parameters())
        if distributed:
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, self.model.named_parameters())
        self.distributed = distributed
        self.seen: list[Any] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, WIDTH).double()).square().mean().backward()
        self.optimizer.step()

    def checkpoint(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def see(self, value: Any) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self.seen.append(torch.load(io.BytesIO(buffer.getvalue())))

    def has_deferred(self, count: int) -> None:
        if self.distributed:
            report = self.optimizer.overlap_report()
            assert report.deferred_parameters == count, str(report)


def reads_a_kept_checkpoint(program: Program) -> None:
    for step in range(12):
        program.step()
        if step == 4:
            kept = program.checkpoint()
        if step in (6, 9):
            program.has_deferred(5)
            program.see(kept)
        if step == 10:
            program.see(float(kept["model"]["1.weight"].numpy().sum()))
    program.has_deferred(5)


def writes_into_a_kept_checkpoint(program: Program) -> None:
    for step in range(12):
        program.step()
        if step == 4:
            kept = program.checkpoint()
        if step == 7:
            kept["model"]["0.weight"].mul_(0.5)
            for state in kept["optimizer"]["state"].values():
                name = "exp_avg" if "exp_avg" in state else "momentum_buffer"
                state[name] = torch.full_like(state[name].detach(), 0.25)
        if step == 9:
            next(iter(kept["optimizer"]["state"].values())).clear()
    program.see(kept)


def loads_a_kept_checkpoint(program: Program) -> None:
    for step in range(10):
        program.step()
        if step == 4:
            kept = program.checkpoint()
    program.model.load_state_dict(kept["model"])
    program.optimizer.load_state_dict(kept["optimizer"])
    program.step()
    program.step()


def keeps_other_things(program: Program) -> None:
    lists = [p.data for p in program.model.parameters()], tuple(program.model.state_dict().values())
    for _ in range(7):
        program.step()
    program.has_deferred(5)
    program.see(lists)
    array = lists[0][0].numpy()  # an array asks nobody
    for _ in range(3):
        program.step()
    program.has_deferred(4)
    program.see(torch.from_numpy(array))
    view = lists[1][1].view(-1)
    for _ in range(3):
        program.step()
    program.has_deferred(3)
    program.see(view)


def readers_in_cpp_get_an_error() -> None:
    program = Program("AdamW", True)
    for step in range(8):
        program.step()
        if step == 4:
            kept = program.checkpoint()
    program.has_deferred(5)
    for tensor in (kept["model"]["2.bias"], kept["optimizer"]["state"][0]["exp_avg"]):
        with pytest.raises(RuntimeError, match="StaleRead"):
            copied_by_gloo(tensor)


PROGRAMS = [
    reads_a_kept_checkpoint, writes_into_a_kept_checkpoint, loads_a_kept_checkpoint,
    keeps_other_things,
]  # fmt: skip


@on_ranks(2)
def test_a_kept_checkpoint_is_what_it_is_in_plain_pytorch() -> None:
    with new_job(DEFERS):
        for what in PROGRAMS:
            for optimizer in OPTIMIZERS:
                ours, plain = Program(optimizer, True), Program(optimizer, False)
                for program in (plain, ours):
                    what(program)
                    program.see(list(program.model.parameters()))
                told = f"{what.__name__}, {optimizer}"
                torch.testing.assert_close(ours.seen, plain.seen, rtol=0, atol=0, msg=told)
        readers_in_cpp_get_an_error()
