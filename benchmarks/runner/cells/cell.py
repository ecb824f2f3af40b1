"""One cell of the comparison: a model on some hosts at one rate, every system in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.runner.cells.bounds import ClipBounds, Events, clipped_optimum_s, layer_s, optimum_s
from benchmarks.runner.cells.contestant import Contestant
from benchmarks.runner.cells.planned import write_plan
from benchmarks.runner.cells.weights import same_weights
from benchmarks.runner.commands import step_s
from benchmarks.runner.fleet import Fleet
from benchmarks.runner.records.summary import Ratio, paired_ratio
from benchmarks.runner.turns import Measured, measure_in_turns
from benchmarks.runner.workloads.build import size_bytes
from hvd_order.planning.steps.efficiency import OverlapEfficiency

_TUNING_STEPS = 3
# DDP lays its buckets out anew after the first step, hvd_order learns in two.
_FIRST_STEPS = 3
_WARM_UP = 2
_WIRE_ROUNDS = 3
_NOT_TOGETHER = ("local", "no_waiting", "no_waiting_halves")  # their ranks train by themselves
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
        clip: all gradients are clipped to this global norm in every step; None: they are not.
        ranks_per_host: they share the host's link, and add up the same model.
    """

    model: str
    hosts: int
    rate_mbit: float
    ratio: float | None
    rounds: int = 3
    steps: int = 5
    late: float = 1.0
    clip: float | None = None
    ranks_per_host: int = 1

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def label(self) -> str:
        """The model, and what is unusual about how it is trained."""
        late = f", late {self.late:g}" if self.late != 1 else ""
        if self.ranks_per_host > 1:
            late += f", {self.ranks_per_host} ranks a host"
        return self.model + late + ("" if self.clip is None else ", clipped")

    @property
    def clip_options(self) -> dict[str, float]:
        """For systems.py."""
        return {} if self.clip is None else {"max_norm": self.clip}


@dataclass
class CellResult:
    """What was found.

    Attributes:
        wire_s: a saturated all-reduce of all gradients.
        optimum_s: from the measured local step and wire time: of
            hvd_order/planning/bounds/bound.py, with clipping that of clipped_bound.py.
        recorded: one step of each system, see worker.py.
        same_weights: all systems ended with the same parameters, and so did all ranks (weights.py).
        clip_bounds: None without clipping.
        own_optimum_s: of systems that send fewer bytes: the optimum with these.
    """

    setting: Setting
    size_bytes: int
    wire_s: float
    optimum_s: float
    systems: dict[str, Measured]
    recorded: dict[str, Any]
    same_weights: bool
    clip_bounds: ClipBounds | None = None
    own_optimum_s: dict[str, float] = field(default_factory=dict)

    @property
    def local_s(self) -> float:
        return self.systems["local"].step_s

    @property
    def ratio(self) -> float:
        """Computation over communication, as intended or else as measured."""
        return self.setting.ratio or self.local_s / self.wire_s

    def overlap(self, system: str) -> OverlapEfficiency:
        """The system's step beside what device and link need alone; E and S follow from it."""
        work = (self.local_s, self.wire_s)
        return OverlapEfficiency(self.systems[system].step_s, sum(work), max(work))

    def utilisation(self, system: str) -> float:
        """Share of the link's nominal rate that was used."""
        measured = self.systems[system]
        bits = 8 * statistics.median(measured.sent_bytes)
        return bits / (measured.step_s * self.setting.rate_mbit * 1e6)

    def against(self, system: str, other: str) -> Ratio:
        """Step times of ``system`` over those of ``other``, paired by their place in the run."""
        return paired_ratio(self.systems[system].seconds, self.systems[other].seconds)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "systems": {name: m.to_json() for name, m in self.systems.items()}}

    def summary(self) -> dict[str, Any]:
        """Medians, and what follows from them."""
        return {
            "model": self.setting.model,
            "clip": self.setting.clip,
            "local_s": self.local_s,
            "wire_s": self.wire_s,
            "optimum_s": self.optimum_s,
            "clip_bounds": None if self.clip_bounds is None else asdict(self.clip_bounds),
            "same_weights": self.same_weights,
            "systems": {
                name: {
                    "step_s": measured.step_s,
                    "over_optimum": measured.step_s / self.optimum_s,
                    "over_own": measured.step_s / self.own_optimum_s.get(name, self.optimum_s),
                    "efficiency": self.overlap(name).efficiency,
                    "link_use": self.utilisation(name),
                    "cpu_s": sum(measured.cpu_s) / len(measured.cpu_s),
                }
                for name, measured in self.systems.items()
                if name != "local"
            },
        }


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
    wire = torch_fleet.wire_s(total_bytes, _WIRE_ROUNDS)
    compute_s = [(setting.ratio or 0.0) * statistics.median(wire)] * setting.ranks
    compute_s[-1] *= setting.late
    jobs: dict[str, Fleet] = {}
    results: dict[str, Measured] = {}
    for one in (Contestant("local", "local", local_fleet or torch_fleet), *contestants):
        name, fleet = one.name, one.fleet
        extra: dict[str, Any] = {**setting.clip_options}
        _check_memory(name, setting, total_bytes)
        if name == "ddp_tuned":
            extra["bucket_mib"] = _best_bucket(torch_fleet, one, setting, compute_s, tell)
        elif name == "hvd_order_planned":
            tell("plan")
            local = (local_fleet or torch_fleet)("record", job="local", warm_up=_WARM_UP)[0]
            times = layer_s(local["layers"], local["step_s"])
            with fleet.awake():
                path = Path(one.options["env"]["HVD_ORDER_PLAN"])
                write_plan(fleet, setting.model, times, path, setting.clip is not None)
        tell(f"build {name}")
        results[name], layer_bytes = one.build(setting.model, compute_s, _FIRST_STEPS, **extra)
        jobs[name] = fleet

    def before(number: int, name: str) -> None:
        tell(f"round {number + 1} of {setting.rounds}: {name}")
        if name == "local":
            wire.extend(torch_fleet.wire_s(total_bytes, _WIRE_ROUNDS))

    measure_in_turns(jobs, results, setting.rounds, setting.steps, _WARM_UP, before)
    recorded = {}
    weights = {}
    for name, fleet in jobs.items():
        with fleet.awake():
            recorded[name] = fleet("record", job=name, warm_up=_WARM_UP)[0]
            if name not in _NOT_TOGETHER:
                weights[name] = fleet("weights", job=name)
            fleet("drop", job=name)
    wire_s = statistics.median(wire)
    found = (recorded["local"]["layers"], layer_bytes, results["local"].step_s, wire_s)
    if setting.clip is None:
        best_s, clip_bounds = optimum_s(*found), None
    else:
        best_s, clip_bounds = clipped_optimum_s(*found)
    same = same_weights(weights, setting.clip is not None)
    own_s = {
        name: _own_optimum_s(each["saved_bytes"], *found)
        for name, each in recorded.items()
        if any(each.get("saved_bytes", [])) and setting.clip is None
    }
    return CellResult(
        setting, total_bytes, wire_s, best_s, results, recorded, same, clip_bounds, own_s
    )


def _own_optimum_s(
    saved_bytes: Sequence[int],
    events: Events,
    layer_bytes: Sequence[int],
    local_s: float,
    wire_s: float,
) -> float:
    sent = [size - saved for size, saved in zip(layer_bytes, saved_bytes, strict=True)]
    return optimum_s(events, sent, local_s, wire_s * sum(sent) / sum(layer_bytes))


def _check_memory(name: str, setting: Setting, total_bytes: int) -> None:
    need = _COPIES * setting.ranks * total_bytes
    available = psutil.virtual_memory().available
    if available < need:
        raise MemoryIsShort(
            f"{setting.model}, {setting.hosts} hosts: {name} needs about {need / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB are left beside the systems before it; compare fewer at once"
        )


def _best_bucket(
    fleet: Fleet,
    one: Contestant,
    setting: Setting,
    compute_s: list[float],
    tell: Callable[[str], None],
) -> float:
    best = (float("inf"), 25.0)
    for bucket_mib in one.buckets_mib:
        tell(f"tune DDP: buckets of {bucket_mib:g} MiB")
        fleet("build", job="trial", system="ddp", model=setting.model, compute_s=compute_s,
              options={"bucket_mib": bucket_mib, **setting.clip_options})  # fmt: skip
        answers = fleet("steps", job="trial", count=_TUNING_STEPS, warm_up=_FIRST_STEPS)
        fleet("drop", job="trial")
        best = min(best, (statistics.median(step_s(answers)), bucket_mib))
    return best[1]
