"""Searches for the order, the slice settings and the agreement with the shortest simulated step.

The search goes from coarse to fine: a grid of slice sizes and credits for each order, then the
neighbours of the best settings in both and with every agreement while that helps, then longer
simulations of the best. Settings whose wire time alone exceeds the best step time are skipped.
Equal input gives equal results: every simulation is exact, and the search uses no clock.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.slice_settings import SliceSettings, best_settings
from hvd_order.base.plan.plan_file import Plan, PlanCandidate
from hvd_order.planning.bounds.bound import program_optimum_s, step_bound_s
from hvd_order.planning.bounds.clipped_bound import clipped_program_optimum_s
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.predict.condensed import condensed
from hvd_order.planning.predict.network import Network
from hvd_order.planning.predict.setting_search import (
    AGREEMENTS,
    COARSE_STEPS,
    DEFAULT_ORDER,
    LAST_STEPS,
    ORDERS,
    RIVAL_WITHIN,
    Outcome,
    Setting,
    SettingSearch,
)

__all__ = ["BYTE_SCHEDULER", "Tuned", "tune"]

_LAST = 24  # number of settings with a long simulation
_ALIKE = 1.02  # ratio that trials on real steps (base/link/tuner.py) cannot distinguish
_RIVALS = 2  # runners-up that a plan keeps for trials

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
class Tuned:
    """Result of the search.

    Attributes:
        outcomes: all settings with a long simulation, the best first.
        chosen: the best setting, or an equally good one that is more usual.
        rivals: other settings with the same order and agreement that real steps may prefer.
        default: initial setting of a run without plan.
        whole: the best setting that does not split all-reduces; None without clipping, where no
            setting does.
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
    whole: Outcome | None
    published: dict[str, Outcome]
    ddp_s: float
    bound_s: float
    simulated: int
    plan: Plan


def tune(
    graph: Graph,
    network: Network,
    model: str = "model",
    in_flight: int = 2,
    clipped: bool = False,
) -> Tuned:
    """Searches the best setting for a model on a network.

    Args:
        graph: graph of one worker's step; use median times, minima are too optimistic.
        model: descriptive name.
        in_flight: slices that the default keeps in flight; the engine's value for the transport.
        clipped: whether the program clips gradients by their global norm in every step. Then split
            all-reduces are tried beside whole ones.

    Raises:
        InvalidUsage: no gradient travels: one rank, or no parameter has a gradient.
    """
    if network.ranks < 2:
        raise InvalidUsage("with one rank nothing travels; a plan is for two or more")
    if not any(graph.producers):
        raise InvalidUsage("no parameter of the graph has a gradient, so nothing travels")
    search = SettingSearch(graph, network, clipped)
    advised = best_settings(network.link, search.total_bytes, in_flight)
    usual = Setting(DEFAULT_ORDER, advised)
    halves = Setting(DEFAULT_ORDER, replace(advised, split=True))
    default = halves if clipped else usual
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        search.threads = threads
        search.try_all([default, usual], COARSE_STEPS)
        search.try_all(search.grid(), COARSE_STEPS)
        search.climb()
        published = {
            name: Setting(DEFAULT_ORDER, settings) for name, settings in BYTE_SCHEDULER.items()
        }
        last = [*search.best(_LAST), *published.values()]
        whole = search.best_whole() if clipped else None
        last += [whole] if whole is not None and whole not in last else []
        search.try_all([default, *last], LAST_STEPS, prune=False)
        chosen = _choose(search.outcomes([default, *last]), search.outcome(default))
        rivals = _rivals(chosen, search)
        search.try_all(rivals, LAST_STEPS, prune=False)
    bound_s = _bound_s(condensed(graph), network, clipped)
    plan = _plan(graph, network, model, [chosen, *search.outcomes(rivals)], bound_s, search)
    return Tuned(
        search.outcomes([default, *last]),
        chosen,
        search.outcomes(rivals),
        search.outcome(default),
        None if whole is None else search.outcome(whole),
        {name: search.outcome(setting) for name, setting in published.items()},
        search.ddp_s(),
        bound_s,
        search.simulated,
        plan,
    )


def _bound_s(graph: Graph, network: Network, clipped: bool) -> float:
    """Lower bound on the step time of any order."""
    if len(graph.resources) > 1:
        return step_bound_s(graph, network.link)
    return (clipped_program_optimum_s if clipped else program_optimum_s)(graph, network.link)


def _choose(outcomes: Sequence[Outcome], default: Outcome) -> Outcome:
    """The best outcome, or an equally good one that is more usual. Never worse than the default.

    Among outcomes that differ by less than the simulator's accuracy, the one nearest to the default
    is taken; trials on real steps decide about the others.
    """
    limit_s = min(_ALIKE * outcomes[0].step_s, default.step_s)
    usual = default.setting.slice_settings

    def oddness(outcome: Outcome) -> tuple[int, int, bool, float, float]:
        setting = outcome.setting
        return (
            AGREEMENTS.index(setting.agreement),
            ORDERS.index(setting.order),
            setting.slice_settings.split != usual.split,
            abs(math.log2(setting.slice_settings.slice_bytes / usual.slice_bytes))
            + abs(math.log2(setting.slice_settings.credit_bytes / usual.credit_bytes)),
            outcome.step_s,
        )

    return min((each for each in (default, *outcomes) if each.step_s <= limit_s), key=oddness)


def _rivals(chosen: Outcome, search: SettingSearch) -> list[Setting]:
    """Settings that are almost as good, and different enough for trials to distinguish."""
    wanted = [chosen.setting]
    for setting in search.best(None):
        if len(wanted) > _RIVALS:
            break
        same = (setting.order, setting.agreement) == (
            chosen.setting.order,
            chosen.setting.agreement,
        )
        near_s = RIVAL_WITHIN * chosen.step_s
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
    search: SettingSearch,
) -> Plan:
    setting = candidates[0].setting
    names = None
    if setting.agreement == "planned":
        settings = setting.slice_settings
        layout = search.work(setting.order).layout(settings.slice_bytes, settings.split)
        names = tuple(layout.slice_name(i) for i in search.issue_order(setting))
    travelling = search.orders[setting.order]
    return Plan(
        model,
        network.ranks,
        network.link,
        setting.order,
        tuple(travelling),
        tuple(PlanCandidate(each.setting.slice_settings, each.step_s) for each in candidates),
        bound_s,
        idle=tuple(p for p in graph.parameters if p not in set(travelling)),
        issue_order=names,
    )
