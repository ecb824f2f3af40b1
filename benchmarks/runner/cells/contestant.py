"""The systems of a comparison, each with its ranks, and their steps in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.runner.fleet import Fleet
from benchmarks.runner.places import Place
from benchmarks.runner.records.environment import ROOT
from benchmarks.runner.turns import Measured, measure_in_turns

DDP_BUCKETS_MIB = (1.0, 2.0, 5.0, 10.0, 50.0)
"""Of these "tuned" DDP takes the best; its own default is 25."""

_ONE_SLICE = {"HVD_ORDER_SLICE_BYTES": "25MiB", "HVD_ORDER_CREDIT_BYTES": "50MiB"}
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "hvd_order": {},
    "before": {},  # of another checkout
    "untuned": {"HVD_ORDER_TUNE": "0"},
    "negotiated": {"HVD_ORDER_TUNE": "0", "HVD_ORDER_AGREEMENT": "negotiated"},
    "one_slice": _ONE_SLICE,
    "one_slice_at_once": {**_ONE_SLICE, "HVD_ORDER_CROSS_ITERATION": "0"},
    "bypass": {
        "HVD_ORDER_SLICE_BYTES": "25MiB", "HVD_ORDER_CREDIT_BYTES": "1GiB",
        "HVD_ORDER_CROSS_ITERATION": "0", "HVD_ORDER_AGREEMENT": "planned",
        "HVD_ORDER_POLICY": "arrival",
    },
    "hvd_order_on_horovod": {"HVD_ORDER_TRANSPORT": "horovod"},
}  # fmt: skip
"""hvd_order with other settings than its own choice, by name; their comparison is a reason for
defaults (torch/README.md)."""


@dataclass(frozen=True)
class Contestant:
    """A system in the comparison.

    Attributes:
        name: in tables; "ddp_tuned" is DDP with the best bucket found.
        system: as in systems.py.
        fleet: its ranks, which it may share with others.
        options: for systems.py.
        buckets_mib: of which "ddp_tuned" takes the best.
    """

    name: str
    system: str
    fleet: Fleet
    options: dict[str, Any] = field(default_factory=dict)
    buckets_mib: Sequence[float] = DDP_BUCKETS_MIB

    @classmethod
    def variant(
        cls, name: str, place: Place, knobs: Mapping[str, str], before: Path | None = None
    ) -> Contestant:
        """One of `VARIANTS` with further settings, in ranks of its own: a process reads them once.

        Args:
            before: the checkout of the variant of this name.
        """
        env = {**knobs, **VARIANTS.get(name, {})}
        tree = before.resolve() if name == "before" and before is not None else ROOT
        return cls(name, "hvd_order", place.fleet(tree=tree), {"env": env})

    def build(
        self, model: str, compute_s: Sequence[float], first_steps: int, **options: Any
    ) -> tuple[Measured, list[int]]:
        """Makes the system and runs first steps until it has learnt and tuned.

        Args:
            model: name of a workload.
            compute_s: of each rank's step.
            first_steps: the fewest.
            options: further ones for systems.py.

        Returns:
            Where its steps go, and the size of each layer's gradient, in bytes.
        """
        with self.fleet.awake():
            layer_bytes = self.fleet(
                "build", job=self.name, system=self.system, model=model, compute_s=compute_s,
                options={**self.options, **options},
            )[0]  # fmt: skip
            note = self.fleet("settle", job=self.name, at_least=first_steps)[0]
        return Measured(note), layer_bytes


def compare(
    contestants: Sequence[Contestant], model: str, compute_s: Sequence[float],
    *, first_steps: int, rounds: int, steps: int, warm_up: int,
) -> dict[str, Measured]:  # fmt: skip
    """Builds all systems, then takes each one's steps in turns.

    Args:
        model, compute_s, first_steps: see `Contestant.build`.
        rounds: turns of each.
        steps: measured ones of a turn.
        warm_up: steps of a turn before them.
    """
    measured = {one.name: one.build(model, compute_s, first_steps)[0] for one in contestants}
    fleets = {one.name: one.fleet for one in contestants}
    measure_in_turns(fleets, measured, rounds, steps, warm_up)
    return measured
