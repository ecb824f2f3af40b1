"""Calls of hvd-order cluster run on a small trace, and policies to compare."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.policies.fifo import Fifo
from hvd_order.cluster.policies.interface import PolicyDecision, View
from hvd_order.cluster.policies.packing import pack, take
from hvd_order.cluster.policies.registry import POLICIES, PolicyInputs
from hvd_order.tools.cli.main import main

TRACE = """name,arrival_s,workers,duration_s,worker,model
resnet,0,4,3600,gpu:1 cpu:4,resnet50
bert,600,8,7200,gpu:1 cpu:4,bert
gpt,700,2,5400,gpu:1 cpu:4,gpt2
vgg,900,1,900,gpu:1 cpu:4,vgg16
dlrm,1800,4,1800,gpu:1 cpu:4,dlrm
"""
MACHINES = "2xgpu:4,cpu:32"
DECISIONS = "Mean decision time"


class Chosen:
    """Starts waiting jobs in an order of its own; the first that does not fit blocks the others.

    Rejects what its second argument says.
    """

    def __init__(
        self, order: Callable[[list[str]], Iterable[str]], rejects: Iterable[str] = ()
    ) -> None:
        self._order = order
        self._rejects = set(rejects)

    def decide(self, view: View) -> PolicyDecision:
        decision = PolicyDecision(reject=[n for n in view.waiting if n in self._rejects])
        free = view.free.copy()
        for name in self._order([n for n in view.waiting if n not in self._rejects]):
            placement = pack(view.waiting[name], view.waiting[name].job.requested, free)
            if placement is None:
                break
            take(free, view.waiting[name], placement)
            decision.place[name] = placement
        return decision


class Breaking(Fifo):
    """Breaks off when it is asked for the fourth time."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, view: View) -> PolicyDecision:
        self.asked += 1
        if self.asked == 4:
            raise InvalidUsage("the fourth time")
        return super().decide(view)


def shuffled(known: PolicyInputs) -> Chosen:
    draw = np.random.default_rng(known.seed)
    return Chosen(lambda names: [names[i] for i in draw.permutation(len(names))])


def add_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "last", lambda _: Chosen(reversed))
    monkeypatch.setitem(POLICIES, "choosy", lambda _: Chosen(iter, ["bert", "vgg"]))
    monkeypatch.setitem(POLICIES, "shuffled", shuffled)
    monkeypatch.setattr("hvd_order.cluster.simulate.compare.RANDOM", frozenset({"shuffled"}))


class Called:
    """What a call of the command did."""

    def __init__(self, code: int, out: str, error: str) -> None:
        self.code, self.out, self.error = code, out, error

    @property
    def result(self) -> str:
        """The report without the times that decisions took."""
        return self.out.partition(DECISIONS)[0]

    @property
    def table(self) -> dict[str, dict[str, str]]:
        """Cells by policy and heading."""
        lines = self.result.splitlines()
        begin = next(i for i, line in enumerate(lines) if line.startswith("policy "))
        rows = [
            [cell for cell in line.split("  ") if cell.strip()]
            for line in lines[begin:] if line
        ]  # fmt: skip
        head = [cell.strip() for cell in rows[0]]
        return {
            row[0].strip(): dict(zip(head, map(str.strip, row), strict=True)) for row in rows[1:]
        }


def caller(capsys: pytest.CaptureFixture[str]) -> Callable[..., Called]:
    def called(*arguments: object) -> Called:
        code = main(["cluster", "run", *map(str, arguments)])
        captured = capsys.readouterr()
        return Called(code, captured.out, captured.err)

    return called


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
