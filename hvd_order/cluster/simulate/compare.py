"""Runs the same jobs under several policies, with several seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hvd_order.cluster.links.between import orders_of
from hvd_order.cluster.links.rates import LinkContention
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.policies.registry import RANDOM, PolicyInputs, policy
from hvd_order.cluster.simulate.outcome import JobOutcome
from hvd_order.cluster.simulate.run_folder import RunFolder
from hvd_order.cluster.simulate.simulator import Rules, simulate

__all__ = ["Comparison", "RunResult", "sample"]

T = TypeVar("T")

_EXAMPLES = 1000  # jobs that a policy may see before


@dataclass(frozen=True)
class RunResult:
    """Metrics of one run, by the names of ``Summary.metrics``."""

    policy: str
    seed: int
    metrics: dict[str, float]


class Comparison:
    """Jobs, machines, and the policies to be compared.

    Args:
        jobs: those of a seed by time of arrival, each time anew.
        synthetic: whether another seed means other jobs.
        rules: of each run.
        policies: their names.
        links: orders in which jobs that share links send (``orders_of``); a run's name is then
            ``POLICY+ORDER``. Without any, no job slows another down.
        seeds: at least one.

    Raises:
        InvalidUsage: there is no such policy, or it cannot work with these rules, or what ``jobs``
            raises.
    """

    def __init__(
        self,
        jobs: Callable[[int], Iterable[ClusterJob]],
        synthetic: bool,
        machines: Machines,
        rules: Rules,
        policies: Sequence[str],
        seeds: Sequence[int],
        links: Sequence[str] = (),
    ) -> None:
        self._jobs = jobs
        self._synthetic = synthetic
        self._machines = machines
        self._rules = rules
        self._orders = {f"{name}+{order}": orders_of(order) for name in policies for order in links}
        names = [f"{name}+{order}" for name in policies for order in links] or policies
        self.runs = [
            (name, seed)
            for name in dict.fromkeys(names)
            for seed in (seeds if synthetic or _policy(name) in RANDOM else seeds[:1])
        ]
        # Every job is read once before the first run: a mistake on the last line of a trace shall
        # not cost hours.
        workloads = seeds if synthetic else seeds[:1]
        self._samples = {seed: sample(jobs(seed), _EXAMPLES, seed) for seed in workloads}
        for name, seed in self.runs:
            policy(_policy(name), self._known(seed))

    def jobs_of(self, seed: int) -> int:
        """How many jobs a run of the seed has."""
        return self._sample_of(seed)[0]

    def _sample_of(self, seed: int) -> tuple[int, list[ClusterJob]]:
        return self._samples[seed if self._synthetic else next(iter(self._samples))]

    def _known(self, seed: int) -> PolicyInputs:
        examples = self._sample_of(seed)[1]
        return PolicyInputs(self._machines, self._rules.slot_s, self._rules.until_s, examples, seed)

    def run(
        self, name: str, seed: int, folder: RunFolder | None, ended: Callable[[JobOutcome], None]
    ) -> RunResult:
        """Simulates one of ``runs``, unless the folder has it complete.

        Args:
            folder: keeps the outcomes; None: nobody does.
            ended: called with each job that ends or is rejected, and at the end with the others.

        Raises:
            InvalidUsage: what ``simulate`` raises.
        """
        found = None if folder is None else folder.metrics(name, seed)
        if found is not None:
            return RunResult(name, seed, found)
        chosen, jobs = policy(_policy(name), self._known(seed)), self._jobs(seed)
        orders = self._orders.get(name)
        rates = None if orders is None else LinkContention(self._machines, *orders)
        if folder is None:
            summary = simulate(jobs, self._machines, chosen, self._rules, rates=rates, ended=ended)
            return RunResult(name, seed, summary.metrics())
        with folder.writer(name, seed) as writer:

            def write(outcome: JobOutcome) -> None:
                writer.add(outcome)
                ended(outcome)

            summary = simulate(
                writer.watch(jobs), self._machines, chosen, self._rules, rates=rates, ended=write
            )
        metrics = summary.metrics()
        folder.complete(name, seed, metrics)
        return RunResult(name, seed, metrics)


def _policy(name: str) -> str:
    """The policy of a run of this name."""
    return name.partition("+")[0]


def sample(items: Iterable[T], most: int, seed: int) -> tuple[int, list[T]]:
    """How many items there are, and ``most`` of them by chance, in their order.

    Source: Vitter, "Random Sampling with a Reservoir", ACM TOMS 11(1), 1985, algorithm R.
    """
    draw = random.Random(seed)
    kept: list[tuple[int, T]] = []
    count = 0
    for count, item in enumerate(items, 1):
        if len(kept) < most:
            kept.append((count, item))
        elif (place := draw.randrange(count)) < most:
            kept[place] = (count, item)
    return count, [item for _, item in sorted(kept, key=lambda each: each[0])]
