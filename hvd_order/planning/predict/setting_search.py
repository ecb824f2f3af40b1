"""Simulates settings: a grid, the neighbours of the best, then the best at length.

Real steps vary, and simulated times are not smooth: settings whose last large slice ends just
when the first layer's gradient is ready look better than their neighbours only at exactly that
speed. So each setting is simulated at several paces, and the mean counts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from hvd_order.base.link.slice_settings import (
    AgreementName,
    SliceSettings,
    reservation_lead_s,
    rounded_settings,
)
from hvd_order.planning.graph.graph import Graph, GraphParameter
from hvd_order.planning.orders.registry import order
from hvd_order.planning.predict.condensed import condensed, with_wire_sizes
from hvd_order.planning.predict.network import Network
from hvd_order.planning.predict.simulate import StepWorkload, TransferSchedule, ddp, simulate
from hvd_order.planning.predict.workload import workload_of

__all__ = [
    "AGREEMENTS",
    "COARSE_STEPS",
    "DEFAULT_ORDER",
    "LAST_STEPS",
    "ORDERS",
    "RIVAL_WITHIN",
    "Outcome",
    "Setting",
    "SettingSearch",
]

DEFAULT_ORDER = "due_date"
ORDERS = (DEFAULT_ORDER, "tac", "tic", "search")
AGREEMENTS: tuple[AgreementName, ...] = ("leader", "planned", "negotiated")  # simple ones first
COARSE_STEPS, _FINE_STEPS, LAST_STEPS = 5, 9, 24
RIVAL_WITHIN = 1.1
"""Slower settings, as a ratio to the fastest, are of no interest."""

_SIZES = [round(2 ** (16 + k / 2)) for k in range(21)]  # 64 KiB to 64 MiB
_IN_FLIGHT = (1, 2, 3, 4, 6, 8, 12, 16)
_MOST_SLICES = 2**13  # more slices cost more simulation time than they can gain
_BEAM = 12  # number of settings whose neighbours are simulated
_ROUNDS = 6
_PACES = (0.97, 1.0, 1.03)  # factors on computation times


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


class SettingSearch:
    """Simulated settings and their step times, for one model on one network.

    Attributes:
        orders: parameters that travel, the most urgent first, by each heuristic with a distinct
            order.
        total_bytes: total size of the gradients as they are sent.
        threads: simulate at the same time; to be set before the first simulation.
    """

    def __init__(self, graph: Graph, network: Network, clipped: bool) -> None:
        """Takes ``clipped``, whether the program clips by the global norm in every step."""
        self.network = network
        self.clipped = clipped
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

    def work(self, order_name: str) -> StepWorkload:
        """The workload at the recorded pace."""
        return self._works[order_name][1.0]

    @property
    def simulated(self) -> int:
        """Number of simulated settings."""
        return len(self._found)

    def outcome(self, setting: Setting) -> Outcome:
        """Outcome of a simulated setting."""
        return Outcome(setting, self._found[setting][1])

    def outcomes(self, settings: Iterable[Setting]) -> list[Outcome]:
        """Outcomes of these settings, the fastest first."""
        return sorted(map(self.outcome, dict.fromkeys(settings)), key=_rank)

    def best(self, count: int | None) -> list[Setting]:
        """The fastest settings, at most ``count`` of them."""
        return [outcome.setting for outcome in self.outcomes(self._found)[:count]]

    def best_whole(self) -> Setting:
        """The fastest setting that does not split all-reduces."""
        return next(each for each in self.best(None) if not each.slice_settings.split)

    def grid(self) -> list[Setting]:
        """Every priority order, and arrival, with all sizes and credits of two lists.

        With clipping split, and also whole in order of arrival: when all gradients are awaited, no
        other order is of use.
        """
        least = self.total_bytes // _MOST_SLICES
        sizes = [size for size in _SIZES if size >= least] or _SIZES[-1:]
        sizes = [size for size in sizes if size < 2 * self.total_bytes] or _SIZES[:1]
        settings = [
            Setting(name, replace(rounded_settings(size, count), split=self.clipped))
            for name in self.orders
            for size, count in itertools.product(sizes, _IN_FLIGHT)
        ]
        arrivals = [
            replace(each, slice_settings=replace(each.slice_settings, policy="arrival"))
            for each in settings
            if each.order == DEFAULT_ORDER
        ]
        if not self.clipped:
            return settings + arrivals
        whole = [
            replace(each, slice_settings=replace(each.slice_settings, split=False))
            for each in arrivals
        ]
        return settings + arrivals + whole

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
        limit_s = min((t for _, t in self._found.values()), default=float("inf")) * RIVAL_WITHIN
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
        slices = (2 if settings.split else 1) * self.total_bytes / settings.slice_bytes
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
            self._simulated_s(buckets, replace(schedule, control_latency_s=latency_s), LAST_STEPS)
            for buckets, schedule in map(ddp, self._works[DEFAULT_ORDER].values())
        )

    def _simulated_s(self, work: StepWorkload, schedule: TransferSchedule, steps: int) -> float:
        link = self.network.all_reduce()
        return simulate(
            work, link, schedule,
            ranks=self.network.ranks, steps=steps, clipped=self.clipped,
        ).steady_s  # fmt: skip

    def _schedule(self, setting: Setting) -> TransferSchedule:
        settings = setting.slice_settings
        return TransferSchedule(
            settings.slice_bytes,
            settings.credit_bytes,
            settings.policy,
            setting.agreement,
            split=settings.split,
            control_latency_s=self.network.message_latency_s,
            reservation_lead_s=reservation_lead_s(self.network.link, settings),
        )

    def issue_order(self, setting: Setting) -> list[int]:
        """Order in which the dynamic policy issues slices if agreement needs no message."""
        schedule = replace(self._schedule(setting), agreement="leader", control_latency_s=0.0)
        played = simulate(
            self.work(setting.order), self.network.all_reduce(), schedule,
            ranks=self.network.ranks, steps=COARSE_STEPS, recorded=1, clipped=self.clipped,
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


def _orders(graph: Graph, network: Network) -> dict[str, list[GraphParameter]]:
    """Parameters that travel, the most urgent first, by each heuristic with a distinct order."""
    travel = [p for p, makers in zip(graph.parameters, graph.producers, strict=True) if makers]
    orders: dict[str, list[GraphParameter]] = {}
    for name in ORDERS:
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
                split=settings.split,
            ),
        )
        for factor in (2**-octave, 1.0, 2**octave)
        for near in counts
        for agreement in AGREEMENTS
    ]


def _rank(outcome: Outcome) -> tuple[float, int, int, bool, int, int, str]:
    """Sort key: the fastest first; among equals, the more usual first."""
    setting = outcome.setting
    return (
        outcome.step_s,
        AGREEMENTS.index(setting.agreement),
        ORDERS.index(setting.order),
        setting.slice_settings.split,
        setting.slice_settings.credit_bytes,
        -setting.slice_settings.slice_bytes,
        setting.slice_settings.policy,
    )
