"""One cell of the comparison: a model on some hosts at one rate, every system in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from commands import step_s
from common.summary import Ratio, paired_ratio
from common.turns import turns
from fleet import Fleet
from planned import write_plan
from workloads import size_bytes

from hvd_order.plan.bounds.bound import chain_optimum_s
from hvd_order.plan.steps.efficiency import Overlap

DDP_BUCKETS_MIB = (1.0, 2.0, 5.0, 10.0, 50.0)
"""Tried beside the default of 25 for "tuned" DDP."""
_TUNING_STEPS = 3
# DDP lays its buckets out anew after the first step, hvd_order learns in two.
_FIRST_STEPS = 3
_WARM_UP = 2
_WIRE_ROUNDS = 3
# Of a model's size on each rank: weights, gradients, buffers; hvd_order's are there twice for a
# moment, when it has learnt the order.
_COPIES = 4


class MemoryIsShort(RuntimeError):  # noqa: N818  (says what happened)
    """More systems at once than memory holds: the kernel would drop and read back pages of code."""


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        ratio: computation over communication, both alone; None where the model computes for real.
        rate_mbit: of each host's link, both ways.
        steps: measured steps of a system in each round.
        late: the last rank computes for so many times as long as the others.
    """

    model: str
    hosts: int
    rate_mbit: float
    ratio: float | None
    rounds: int = 3
    steps: int = 5
    late: float = 1.0


@dataclass
class Measured:
    """One system in one cell.

    Attributes:
        seconds: every measured step, from when the last rank has ended one until the last has
            ended the next, round by round.
        cpu_s: processor time a step, all ranks together.
        sent_bytes: that left the busiest host, a step.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class CellResult:
    """What was found.

    Attributes:
        wire_s: a saturated all-reduce of all gradients.
        optimum_s: of hvd_order/plan/bounds/bound.py, from the measured local step and wire time.
        recorded: one step of each system, see worker.py.
        same_weights: all systems ended with the same parameters, and so did all ranks.
    """

    setting: Setting
    size_bytes: int
    wire_s: float
    optimum_s: float
    systems: dict[str, Measured]
    recorded: dict[str, Any]
    same_weights: bool

    @property
    def local_s(self) -> float:
        return self.systems["local"].step_s

    @property
    def ratio(self) -> float:
        """Computation over communication, as intended or else as measured."""
        return self.setting.ratio or self.local_s / self.wire_s

    def overlap(self, system: str) -> Overlap:
        """The system's step beside what device and link need alone; E and S follow from it."""
        work = (self.local_s, self.wire_s)
        return Overlap(self.systems[system].step_s, sum(work), max(work))

    def utilisation(self, system: str) -> float:
        """Share of the link's nominal rate that was used."""
        measured = self.systems[system]
        bits = 8 * statistics.median(measured.sent_bytes)
        return bits / (measured.step_s * self.setting.rate_mbit * 1e6)

    def against(self, system: str, other: str) -> Ratio:
        """Step times of ``system`` over those of ``other``, paired by their place in the run."""
        return paired_ratio(self.systems[system].seconds, self.systems[other].seconds)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> dict[str, Any]:
        """Medians, and what follows from them."""
        return {
            "model": self.setting.model,
            "local_s": self.local_s,
            "wire_s": self.wire_s,
            "optimum_s": self.optimum_s,
            "same_weights": self.same_weights,
            "systems": {
                name: {
                    "step_s": measured.step_s,
                    "over_optimum": measured.step_s / self.optimum_s,
                    "efficiency": self.overlap(name).efficiency,
                    "link_use": self.utilisation(name),
                    "cpu_s": sum(measured.cpu_s) / len(measured.cpu_s),
                }
                for name, measured in self.systems.items()
                if name != "local"
            },
        }


@dataclass(frozen=True)
class Contestant:
    """A system in the comparison.

    Attributes:
        name: in tables; "ddp_tuned" is DDP with the best bucket found.
        system: as in systems.py.
        fleet: its ranks, which it may share with others.
        options: for systems.py.
    """

    name: str
    system: str
    fleet: Fleet
    options: dict[str, Any] = field(default_factory=dict)


def run_cell(
    torch_fleet: Fleet,
    contestants: Sequence[Contestant],
    setting: Setting,
    tell: Callable[[str], None],
    local_fleet: Fleet | None = None,
) -> CellResult:
    """Measures every system in turns.

    Args:
        torch_fleet: measures the wire time, and what no other fleet does.
        tell: takes a line about what is going on.
        local_fleet: makes the local steps; None: the same.

    Raises:
        MemoryIsShort: before a system is built that does not fit beside the others.
    """
    total_bytes = size_bytes(setting.model)
    wire = _wire(torch_fleet, total_bytes)
    compute_s = [(setting.ratio or 0.0) * statistics.median(wire)] * setting.hosts
    compute_s[-1] *= setting.late
    jobs: dict[str, Fleet] = {}
    results: dict[str, Measured] = {}
    for one in (Contestant("local", "local", local_fleet or torch_fleet), *contestants):
        name, fleet, extra = one.name, one.fleet, dict(one.options)
        _check_memory(name, setting, total_bytes)
        if name == "ddp_tuned":
            extra["bucket_mib"] = _best_bucket(torch_fleet, setting.model, compute_s, tell)
        elif name == "hvd_order_planned":
            tell("plan")
            local = (local_fleet or torch_fleet)("record", job="local", warm_up=_WARM_UP)[0]
            layer_s = _layer_s(local["layers"], local["step_s"])
            with fleet.awake():
                write_plan(fleet, setting.model, layer_s, Path(extra["env"]["HVD_ORDER_PLAN"]))
        results[name] = Measured()
        tell(f"build {name}")
        with fleet.awake():
            layer_bytes = fleet("build", job=name, system=one.system, model=setting.model,
                                compute_s=compute_s, options=extra)[0]  # fmt: skip
            results[name].note = fleet("settle", job=name, at_least=_FIRST_STEPS)[0]
        jobs[name] = fleet
    for number, name in turns(list(results), setting.rounds):
        tell(f"round {number + 1} of {setting.rounds}: {name}")
        if name == "local":
            wire += _wire(torch_fleet, total_bytes)
        with jobs[name].awake():
            answers = jobs[name]("steps", job=name, count=setting.steps, warm_up=_WARM_UP)
        measured = results[name]
        measured.seconds += step_s(answers)
        measured.cpu_s.append(sum(a["cpu_s"] for a in answers))
        measured.sent_bytes.append(max(a["sent_bytes"] for a in answers))
    recorded = {}
    weights = {}
    for name, fleet in jobs.items():
        with fleet.awake():
            recorded[name] = fleet("record", job=name, warm_up=_WARM_UP)[0]
            if name not in ("local", "no_waiting"):  # which do not train together
                weights[name] = fleet("weights", job=name)
            fleet("drop", job=name)
    wire_s = statistics.median(wire)
    return CellResult(
        setting,
        total_bytes,
        wire_s,
        _optimum(recorded["local"]["layers"], layer_bytes, results["local"].step_s, wire_s),
        results,
        recorded,
        _same(weights),
    )


def _check_memory(name: str, setting: Setting, total_bytes: int) -> None:
    need = _COPIES * setting.hosts * total_bytes
    available = psutil.virtual_memory().available
    if available < need:
        raise MemoryIsShort(
            f"{setting.model}, {setting.hosts} hosts: {name} needs about {need / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB are left beside the systems before it; compare fewer at once"
        )


def _wire(fleet: Fleet, size_bytes: int) -> list[float]:
    answers = fleet("wire", size_bytes=size_bytes, rounds=_WIRE_ROUNDS)
    return [max(seconds) for seconds in zip(*answers, strict=True)]


def _best_bucket(
    fleet: Fleet, model: str, compute_s: list[float], tell: Callable[[str], None]
) -> float:
    best = (float("inf"), 25.0)
    for bucket_mib in DDP_BUCKETS_MIB:
        tell(f"tune DDP: buckets of {bucket_mib:g} MiB")
        fleet("build", job="trial", system="ddp", model=model, compute_s=compute_s,
              options={"bucket_mib": bucket_mib})  # fmt: skip
        answers = fleet("steps", job="trial", count=_TUNING_STEPS, warm_up=_FIRST_STEPS)
        fleet("drop", job="trial")
        best = min(best, (statistics.median(step_s(answers)), bucket_mib))
    return best[1]


def _optimum(
    events: list[tuple[str, str, float, float]],
    layer_bytes: list[int],
    local_s: float,
    wire_s: float,
) -> float:
    """From what was measured.

    Args:
        events: of a recorded local step, or several.
        local_s: step time.
    """
    forward_s, backward_s = zip(*_layer_s(events, local_s), strict=True)
    return chain_optimum_s(
        forward_s, backward_s, [wire_s * size / sum(layer_bytes) for size in layer_bytes]
    )


def _layer_s(
    events: list[tuple[str, str, float, float]], local_s: float
) -> list[tuple[float, float]]:
    """Forward and backward time of each layer.

    Args:
        events: of a recorded local step, or several.
        local_s: step time, which is spread over the layers: it includes the optimizer.
    """
    names = list(dict.fromkeys(name for name, kind, _, _ in events if kind == "forward"))
    took = {(name, kind): 0.0 for name in names for kind in ("forward", "backward")}
    for name, kind, begin, end in events:
        took[name, kind] += end - begin
    scale = local_s / sum(took.values())
    return [(scale * took[name, "forward"], scale * took[name, "backward"]) for name in names]


def _same(weights: dict[str, list[list[float]]]) -> bool:
    """Whether all systems and ranks agree, up to the rounding of sums taken in another order."""
    everything = [values for by_rank in weights.values() for values in by_rank]
    return all(
        abs(a - b) <= 1e-5 * max(abs(a), abs(b))
        for values in everything
        for a, b in zip(everything[0], values, strict=True)
    )
