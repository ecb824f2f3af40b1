"""Searches for the order, the slice settings and the agreement with the shortest simulated step.

The search goes from coarse to fine: a grid of slice sizes and credits for each order, then the
neighbours of the best settings in both and with every agreement while that helps, then longer
simulations of the best. Settings whose wire time alone exceeds the best step time are skipped.
Equal input gives equal results: every simulation is exact, and the search uses no clock.

Real steps vary, and simulated times are not smooth: settings whose last large slice ends just
when the first layer's gradient is ready look better than their neighbours only at exactly that
speed. So each setting is simulated at several paces, and the mean counts.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from hvd_order.errors import InvalidUsage
from hvd_order.plan.bounds.bound import program_optimum_s, step_bound_s
from hvd_order.plan.files.plan_file import Candidate, Plan
from hvd_order.plan.graph.graph import Graph, Parameter
from hvd_order.plan.link.slice_settings import (
    AgreementName,
    SliceSettings,
    best_settings,
    reservation_lead_s,
    rounded_settings,
)
from hvd_order.plan.orders.registry import order
from hvd_order.predict.condensed import condensed, with_wire_sizes
from hvd_order.predict.network import Network
from hvd_order.predict.simulate import Schedule, Workload, ddp, simulate
from hvd_order.predict.workload import workload_of

__all__ = ["BYTE_SCHEDULER", "DEFAULT_ORDER", "Outcome", "Setting", "Tuned", "tune"]

DEFAULT_ORDER = "due_date"
_ORDERS = (DEFAULT_ORDER, "tac", "tic", "search")
_AGREEMENTS: tuple[AgreementName, ...] = ("leader", "planned", "negotiated")  # simple ones first

_MIB = 2**20
_SIZES = [round(2 ** (16 + k / 2)) for k in range(21)]  # 64 KiB to 64 MiB
_IN_FLIGHT = (1, 2, 3, 4, 6, 8, 12, 16)
_MOST_SLICES = 2**13  # more slices cost more simulation time than they can gain
_COARSE_STEPS, _FINE_STEPS, _LAST_STEPS = 5, 9, 24
_BEAM = 12  # number of settings whose neighbours are simulated
_ROUNDS = 6
_LAST = 24  # number of settings with a long simulation
_PACES = (0.97, 1.0, 1.03)  # factors on computation times
_ALIKE = 1.02  # ratio that trials on real steps (plan/link/tuner.py) cannot distinguish
_RIVALS = 2  # runners-up that a plan keeps for trials
_RIVAL_WITHIN = 1.1

BYTE_SCHEDULER = {
    "ByteScheduler, 1e6 / 4e6": SliceSettings(4_000_000, 16_000_000),
    "ByteScheduler, 8e6 / 16e6": SliceSettings(32_000_000, 64_000_000),
}
"""Published defaults: parameters in a slice and of credit, 4 bytes each.

Source:
    Peng et al., "A generic communication scheduler for distributed DNN training", SOSP 2019, and
    the authors' code (BYTESCHEDULER_PARTITION, BYTESCHEDULER_CREDIT).
"""


@dataclass(frozen=True)
class Setting:
    """All settings of the engine for one model."""

    order: str
    slice_settings: SliceSettings

    @property
    def agreement(self) -> AgreementName:
        """Order agreement."""
        return self.slice_settings.agreement


@dataclass(frozen=True)
class Outcome:
    """A setting and its simulated step time in seconds, the mean of all paces."""

    setting: Setting
    step_s: float


@dataclass(frozen=True)
class Tuned:
    """Result of the search.

    Attributes:
        outcomes: all settings with a long simulation, the best first.
        chosen: the best setting, or an equally good one that is more usual.
        rivals: other settings with the same order and agreement that real steps may prefer.
        default: initial setting of a run without plan.
        published: ByteScheduler's defaults, by name.
        ddp_s: step time of DistributedDataParallel.
        bound_s: lower bound on the step time of any order.
        simulated: number of simulated settings.
        plan: plan for the engine.
    """

    outcomes: list[Outcome]
    chosen: Outcome
    rivals: list[Outcome]
    default: Outcome
    published: dict[str, Outcome]
    ddp_s: float
    bound_s: float
    simulated: int
    plan: Plan


def tune(graph: Graph, network: Network, model: str = "model", in_flight: int = 2) -> Tuned:
    """Searches the best setting for a model on a network.

    Args:
        graph: graph of one worker's step; use median times, minima are too optimistic.
        model: descriptive name.
        in_flight: slices that the default keeps in flight; the engine's value for the transport.

    Raises:
        InvalidUsage: no gradient travels: one rank, or no parameter has a gradient.
    """
    if network.ranks < 2:
        raise InvalidUsage("with one rank nothing travels; a plan is for two or more")
    if not any(graph.producers):
        raise InvalidUsage("no parameter of the graph has a gradient, so nothing travels")
    search = _Search(graph, network)
    default = Setting(DEFAULT_ORDER, best_settings(network.link, search.total_bytes, in_flight))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        search.threads = threads
        search.try_all([default], _COARSE_STEPS)
        search.try_all(search.grid(), _COARSE_STEPS)
        search.climb()
        published = {
            name: Setting(DEFAULT_ORDER, settings) for name, settings in BYTE_SCHEDULER.items()
        }
        last = [*search.best(_LAST), *published.values()]
        search.try_all([default, *last], _LAST_STEPS, prune=False)
        chosen = _choose(search.outcomes([default, *last]), search.outcome(default))
        rivals = _rivals(chosen, search)
        search.try_all(rivals, _LAST_STEPS, prune=False)
    single = len(graph.resources) == 1
    bound_s = (program_optimum_s if single else step_bound_s)(condensed(graph), network.link)
    plan = _plan(graph, network, model, [chosen, *search.outcomes(rivals)], bound_s, search)
    return Tuned(
        search.outcomes([default, *last]),
        chosen,
        search.outcomes(rivals),
        search.outcome(default),
        {name: search.outcome(setting) for name, setting in published.items()},
        search.ddp_s(),
        bound_s,
        search.simulated,
        plan,
    )


class _Search:
    """Simulated settings and their step times."""

    def __init__(self, graph: Graph, network: Network) -> None:
        self.network = network
        self.orders = _orders(graph, network)
        small = with_wire_sizes(condensed(graph))
        paced = {pace: _at_pace(small, pace) for pace in _PACES}
        self._works = {
            name: {
                pace: workload_of(same, {p.name: i for i, p in enumerate(parameters)})
                for pace, same in paced.items()
            }
            for name, parameters in self.orders.items()
        }
        self.total_bytes = sum(self.work(DEFAULT_ORDER).parameter_bytes)
        self.threads: ThreadPoolExecutor
        self._found: dict[Setting, tuple[int, float]] = {}  # steps, step time

    def work(self, order_name: str) -> Workload:
        """The workload at the recorded pace."""
        return self._works[order_name][1.0]

    @property
    def simulated(self) -> int:
        return len(self._found)

    def outcome(self, setting: Setting) -> Outcome:
        return Outcome(setting, self._found[setting][1])

    def outcomes(self, settings: Iterable[Setting]) -> list[Outcome]:
        """Outcomes of these settings, the fastest first."""
        return sorted(map(self.outcome, dict.fromkeys(settings)), key=_rank)

    def best(self, count: int | None) -> list[Setting]:
        return [outcome.setting for outcome in self.outcomes(self._found)[:count]]

    def grid(self) -> list[Setting]:
        """Every priority order, and arrival, with all sizes and credits of two lists."""
        least = self.total_bytes // _MOST_SLICES
        sizes = [size for size in _SIZES if size >= least] or _SIZES[-1:]
        sizes = [size for size in sizes if size < 2 * self.total_bytes] or _SIZES[:1]
        settings = [
            Setting(name, rounded_settings(size, count))
            for name in self.orders
            for size, count in itertools.product(sizes, _IN_FLIGHT)
        ]
        arrivals = [
            replace(each, slice_settings=replace(each.slice_settings, policy="arrival"))
            for each in settings
            if each.order == DEFAULT_ORDER
        ]
        return settings + arrivals

    def climb(self) -> None:
        """Simulates the neighbours of the best settings until none is better."""
        octave = 0.25
        for _ in range(_ROUNDS):
            beam = self.best(_BEAM)
            before_s = self.outcome(beam[0]).step_s
            near = [other for each in beam for other in _neighbours(each, octave)]
            self.try_all([*beam, *near], _FINE_STEPS)
            after_s = self.outcome(self.best(1)[0]).step_s
            if after_s > 0.999 * before_s:
                if octave <= 0.0625:
                    break
                octave /= 2

    def try_all(self, settings: Iterable[Setting], steps: int, prune: bool = True) -> None:
        """Simulates settings that lack a simulation of ``steps`` steps and might be the best."""
        limit_s = min((t for _, t in self._found.values()), default=float("inf")) * _RIVAL_WITHIN
        new = [
            setting
            for setting in dict.fromkeys(settings)
            if self._found.get(setting, (0, 0.0))[0] < steps
            and not (prune and self._least_s(setting.slice_settings) > limit_s)
        ]
        times = self.threads.map(lambda setting: self._step_s(setting, steps), new)
        for setting, step_s in zip(new, times, strict=True):
            self._found[setting] = (steps, step_s)

    def _least_s(self, settings: SliceSettings) -> float:
        """Time of the link alone for a step's slices."""
        link = self.network.link
        slices = self.total_bytes / settings.slice_bytes
        return slices * link.slice_cost_s + self.total_bytes * link.seconds_per_byte

    def _step_s(self, setting: Setting, steps: int) -> float:
        schedule = self._schedule(setting)
        if setting.agreement == "planned":
            plan = self.issue_order(setting)
            schedule = replace(schedule, policy="planned", agreement="planned", plan=plan)
        works = self._works[setting.order].values()
        return statistics.fmean(self._simulated_s(work, schedule, steps) for work in works)

    def ddp_s(self) -> float:
        """Step time of DistributedDataParallel, mean of all paces."""
        latency_s = self.network.message_latency_s
        return statistics.fmean(
            self._simulated_s(buckets, replace(schedule, control_latency_s=latency_s), _LAST_STEPS)
            for buckets, schedule in map(ddp, self._works[DEFAULT_ORDER].values())
        )

    def _simulated_s(self, work: Workload, schedule: Schedule, steps: int) -> float:
        link = self.network.all_reduce()
        return simulate(work, link, schedule, ranks=self.network.ranks, steps=steps).steady_s

    def _schedule(self, setting: Setting) -> Schedule:
        settings = setting.slice_settings
        return Schedule(
            settings.slice_bytes,
            settings.credit_bytes,
            settings.policy,
            setting.agreement,
            control_latency_s=self.network.message_latency_s,
            reservation_lead_s=reservation_lead_s(self.network.link, settings),
        )

    def issue_order(self, setting: Setting) -> list[int]:
        """Order in which the dynamic policy issues slices if agreement needs no message."""
        schedule = replace(self._schedule(setting), agreement="leader", control_latency_s=0.0)
        played = simulate(
            self.work(setting.order), self.network.all_reduce(), schedule,
            ranks=self.network.ranks, steps=_COARSE_STEPS, recorded=1,
        )  # fmt: skip
        (times,) = played.slices()
        arrival = setting.slice_settings.policy == "arrival"
        keys = [(t.issued_s, t.ready_s if arrival else 0.0, i) for i, t in enumerate(times)]
        return [slice_ for _, _, slice_ in sorted(keys)]


def _at_pace(graph: Graph, pace: float) -> Graph:
    """Multiplies the duration of every op by ``pace``."""
    return replace(
        graph, ops=tuple(replace(op, duration_s=pace * op.duration_s) for op in graph.ops)
    )


def _orders(graph: Graph, network: Network) -> dict[str, list[Parameter]]:
    """Parameters that travel, the most urgent first, by each heuristic with a distinct order."""
    travel = [p for p, makers in zip(graph.parameters, graph.producers, strict=True) if makers]
    orders: dict[str, list[Parameter]] = {}
    for name in _ORDERS:
        priorities = order(name, graph, network.link)
        found = sorted(travel, key=lambda parameter: priorities[parameter.name])
        if found not in orders.values():
            orders[name] = found
    return orders


def _neighbours(setting: Setting, octave: float) -> list[Setting]:
    """Settings with slightly different slice size or credit, or another agreement."""
    settings = setting.slice_settings
    count = max(settings.credit_bytes // settings.slice_bytes, 1)
    place = min(range(len(_IN_FLIGHT)), key=lambda i: abs(_IN_FLIGHT[i] - count))
    counts = _IN_FLIGHT[max(place - 1, 0) : place + 2]
    return [
        Setting(
            setting.order,
            replace(
                rounded_settings(settings.slice_bytes * factor, near, settings.policy),
                agreement=agreement,
            ),
        )
        for factor in (2**-octave, 1.0, 2**octave)
        for near in counts
        for agreement in _AGREEMENTS
    ]


def _rank(outcome: Outcome) -> tuple[float, int, int, int, int, str]:
    """Sort key: the fastest first; among equals, the more usual first."""
    setting = outcome.setting
    return (
        outcome.step_s,
        _AGREEMENTS.index(setting.agreement),
        _ORDERS.index(setting.order),
        setting.slice_settings.credit_bytes,
        -setting.slice_settings.slice_bytes,
        setting.slice_settings.policy,
    )


def _choose(outcomes: Sequence[Outcome], default: Outcome) -> Outcome:
    """The best outcome, or an equally good one that is more usual. Never worse than the default.

    Among outcomes that differ by less than the simulator's accuracy, the one nearest to the default
    is taken; trials on real steps decide about the others.
    """
    limit_s = min(_ALIKE * outcomes[0].step_s, default.step_s)
    usual = default.setting.slice_settings

    def oddness(outcome: Outcome) -> tuple[int, int, float, float]:
        setting = outcome.setting
        return (
            _AGREEMENTS.index(setting.agreement),
            _ORDERS.index(setting.order),
            abs(math.log2(setting.slice_settings.slice_bytes / usual.slice_bytes))
            + abs(math.log2(setting.slice_settings.credit_bytes / usual.credit_bytes)),
            outcome.step_s,
        )

    return min((each for each in (default, *outcomes) if each.step_s <= limit_s), key=oddness)


def _rivals(chosen: Outcome, search: _Search) -> list[Setting]:
    """Settings that are almost as good, and different enough for trials to distinguish."""
    wanted = [chosen.setting]
    for setting in search.best(None):
        if len(wanted) > _RIVALS:
            break
        same = (setting.order, setting.agreement) == (
            chosen.setting.order,
            chosen.setting.agreement,
        )
        near_s = _RIVAL_WITHIN * chosen.step_s
        if same and search.outcome(setting).step_s <= near_s and not any(
            setting.slice_settings.resembles(other.slice_settings) for other in wanted
        ):  # fmt: skip
            wanted.append(setting)
    return wanted[1:]


def _plan(
    graph: Graph,
    network: Network,
    model: str,
    candidates: Sequence[Outcome],
    bound_s: float,
    search: _Search,
) -> Plan:
    setting = candidates[0].setting
    names = None
    if setting.agreement == "planned":
        layout = search.work(setting.order).layout(setting.slice_settings.slice_bytes)
        names = tuple(layout.slice_name(i) for i in search.issue_order(setting))
    travelling = search.orders[setting.order]
    return Plan(
        model,
        network.ranks,
        network.link,
        setting.order,
        tuple(travelling),
        tuple(Candidate(each.setting.slice_settings, each.step_s) for each in candidates),
        bound_s,
        idle=tuple(p for p in graph.parameters if p not in set(travelling)),
        issue_order=names,
    )
