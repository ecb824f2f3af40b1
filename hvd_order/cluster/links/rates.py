"""Speeds of jobs whose transfers share the links of machines, for the cluster simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd_order.cluster.links.between import Between, sharing_of
from hvd_order.cluster.links.fairness import shares
from hvd_order.cluster.links.jobs import LinkJob
from hvd_order.cluster.links.load import load_of
from hvd_order.cluster.links.shared import alone_s, simulate_shared
from hvd_order.cluster.links.step import Inside, LinkStep, step_of
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.policies.interface import JobState

__all__ = ["LinkContention"]

_ITERATIONS = 20  # of the slowest job, were it to share each link with all others
_KEPT = 10_000  # simulated groups

_Parts = tuple[tuple[int, float], ...]  # link, seconds for each byte
_Key = tuple[tuple[LinkStep, _Parts, int], ...]


class LinkContention:
    """Speed of each job under those that run beside it: ``rates`` of ``cluster.simulate``.

    A job has the speed that ``ClusterJob.speed`` says when it is alone on its links and sends in
    order. It is slower by as much as another order inside jobs lengthens its iteration alone, and
    by as much as other jobs lengthen it.

    Jobs that share links, also through others, are a group. A group of a few jobs is simulated for
    about 20 iterations, and the result is kept for equal groups. In a larger one, jobs get the
    iterations that links and their own speed allow, if no transfer had to wait for another: an
    upper bound, by the same max-min or priorities.

    A job on one machine, or on machines without a limit on their links, shares nothing, nor does
    one without ``ClusterJob.graph``.
    """

    def __init__(
        self,
        machines: Machines,
        between: Between = "fair",
        inside: Inside = "ordered",
        *,
        simulated: int = 6,
    ) -> None:
        """Sets the orders.

        Args:
            simulated: most jobs of a group that is simulated.
        """
        self._capacity = [machine.bytes_per_s for machine in machines.machines]
        self._inside = inside
        self._between = between
        self._simulated = simulated
        self._known: dict[str, tuple[JobPlacement, LinkJob | None, float]] = {}
        self._groups: dict[_Key, list[float]] = {}

    def __call__(self, running: Mapping[str, JobState]) -> dict[str, float]:
        """Samples a second of all running jobs."""
        self._known = {name: one for name, one in self._known.items() if name in running}
        rates = {}
        on_links: list[LinkJob] = []
        for name, state in running.items():
            assert state.placement is not None
            rates[name] = state.job.samples_per_s(state.placement)
            job, speedup = self._job(name, state.job, state.placement)
            if job is not None:
                rates[name] *= speedup
                on_links.append(job)
        for group in _groups(on_links):
            if len(group) > 1:
                for job, slowdown in zip(group, self._slowdowns(group), strict=True):
                    rates[job.name] /= slowdown
        return rates

    def _job(
        self, name: str, job: ClusterJob, placement: JobPlacement
    ) -> tuple[LinkJob | None, float]:
        """The job as links see it, and how much faster it is alone than in order."""
        known = self._known.get(name)
        if known is None or known[0] != placement:
            load = {link: amount for link, amount in load_of(placement).items()
                    if self._capacity[link] < float("inf")}  # fmt: skip
            step = step_of(job.graph, self._inside) if load and job.graph else None
            if step is None or not step.size_bytes or job.graph is None:
                known = (placement, None, 1.0)
            else:
                found = LinkJob(name, step, load, placement.workers)
                per_byte = max(amount / self._capacity[link] for link, amount in load.items())
                ordered_s = alone_s(step_of(job.graph, "ordered"), per_byte)
                known = (placement, found, ordered_s / alone_s(found.step, per_byte))
            self._known[name] = known
        return known[1], known[2]

    def _slowdowns(self, group: Sequence[LinkJob]) -> list[float]:
        """Iteration of each job of the group over its iteration alone."""
        links = dict.fromkeys(link for job in group for link in job.load)
        places = {link: i for i, link in enumerate(links)}
        key = tuple(
            (job.step, tuple((places[link], load / self._capacity[link])
                             for link, load in job.load.items()), job.workers)
            for job in group
        )  # fmt: skip
        found = self._groups.get(key)
        if found is None:
            # With capacities of 1 a load is in seconds for each byte.
            jobs = [LinkJob(str(i), step, dict(parts), workers)
                    for i, (step, parts, workers) in enumerate(key)]  # fmt: skip
            if len(self._groups) >= _KEPT:
                self._groups.clear()
            found = self._groups[key] = _slowdowns(
                jobs, len(places), self._between, len(jobs) <= self._simulated
            )
        return found


def _slowdowns(
    jobs: Sequence[LinkJob], links: int, between: Between, simulated: bool
) -> list[float]:
    capacity = [1.0] * links
    link_s = [job.link_s(capacity) for job in jobs]
    own_s = [alone_s(job.step, s / job.step.size_bytes if s else 0.0)
             for job, s in zip(jobs, link_s, strict=True)]  # fmt: skip
    sharing = sharing_of("fair" if between == "cassini" and not simulated else between,
                         jobs, capacity)  # fmt: skip
    if simulated:
        until_s = _ITERATIONS * max(
            own + sum(other for job, other in zip(jobs, link_s, strict=True)
                      if job is not one and job.load.keys() & one.load.keys())
            for one, own in zip(jobs, own_s, strict=True)
        )  # fmt: skip
        traces = simulate_shared(jobs, capacity, until_s, sharing)
        shared_s = [trace.iteration_s for trace in traces]
    else:
        # A link of its own for each job lets through what the job can do alone. It carries as much
        # as the job's narrowest link, so fairness still counts seconds of links.
        loads = [
            {link: load * job.step.size_bytes for link, load in job.load.items()} | {links + i: own}
            for i, (job, own) in enumerate(zip(jobs, link_s, strict=True))
        ]
        limits = [part / own for part, own in zip(link_s, own_s, strict=True)]
        often = shares(loads, sharing.levels, capacity + limits)
        shared_s = [1 / rate if rate > 0 else float("inf") for rate in often]
    return [max(shared / own, 1.0) for shared, own in zip(shared_s, own_s, strict=True)]


def _groups(jobs: Sequence[LinkJob]) -> list[list[LinkJob]]:
    """Jobs that share links, directly or through others; in their order."""
    joined: dict[int, int] = {}  # a link and another one of its group; the last one has itself

    def last(link: int) -> int:
        while joined.setdefault(link, link) != link:
            joined[link] = link = joined[joined[link]]
        return link

    for job in jobs:
        first, *others = job.load
        for link in others:
            joined[last(link)] = last(first)
    groups: dict[int, list[LinkJob]] = {}
    for job in jobs:
        groups.setdefault(last(next(iter(job.load))), []).append(job)
    return list(groups.values())
