"""The search: a population of schedules, each an array of jobs over workers' places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd_order.cluster.model.machines import Amounts
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.policies.interface import JobState
from hvd_order.cluster.policies.ones.score import remaining_worker_s
from hvd_order.cluster.policies.packing import pack, take

__all__ = ["POPULATION", "PopulationMember", "Problem", "Search"]

POPULATION = 16
_LEAVES = 0.3  # probability that a mutation takes a job out
_NOBODY = -1

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """What is known of the jobs at one moment. Jobs are numbered by their place in ``states``.

    Attributes:
        least, limit: workers that each job can have.
        rates: samples/s of each job by number of workers, up to the largest limit.
        done: samples of each job, more than 0.
        new: whether it has never run.
        may_leave: whether a mutation may take it out.
        change_s: time for which a job stands still when its workers change.
        places: on each machine, where a worker can be.
    """

    states: Sequence[JobState]
    least: Counts
    limit: Counts
    rates: NDArray[np.float64]
    done: NDArray[np.float64]
    new: NDArray[np.bool_]
    may_leave: NDArray[np.bool_]
    change_s: float
    free: Amounts
    places: Counts


@dataclass(frozen=True)
class PopulationMember:
    """A member of the population.

    Attributes:
        wanted: workers of each job, by which it is scored: what finds no machine must not count
            as work that is saved.
        counts: those that found machines.
        genes: the job of each place, or -1.
        placements: of all jobs with workers.
    """

    wanted: Counts
    counts: Counts
    genes: Counts
    placements: dict[int, JobPlacement]


class Search:
    """Breeds schedules for one problem.

    Source: the public code of ONES (SC 2021), as read: operators, probabilities, size of the
    population, and the score. Reconstructed: which places a job takes when schedules are put in
    order (here it keeps its present ones if its number of workers is the present one, else it goes
    where ``pack`` puts it, the largest first), and the cost of a change in the score.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self._problem = problem
        self._rng = rng
        self._first = np.concatenate([[0], np.cumsum(problem.places)]).astype(np.int64)
        self._present: Counts = np.array(
            [0 if s.placement is None else s.placement.workers for s in problem.states],
            dtype=np.int64,
        )
        # What running jobs take on their machines.
        self._usage = {
            j: ([part.machine for part in s.placement.parts], s.usage(s.placement))
            for j, s in enumerate(problem.states) if s.placement is not None
        }  # fmt: skip
        # Amounts of the whole cluster, of a worker and its part of a server.
        taken = [usage.sum(axis=0) for _, usage in self._usage.values()]
        self._whole = np.sum([problem.free.sum(axis=0), *taken], axis=0)
        self._units: Amounts = np.array(
            [s.worker + s.server / (s.job.workers_per_server or math.inf) for s in problem.states]
        )
        self._needs = [[(r, a) for r, a in enumerate(u) if a > 0] for u in self._units.tolist()]

    # ---------------------------------------------------------------------------- operators
    def pad(self, counts: Counts, order: Sequence[int], *, grow: bool = True) -> Counts:
        """Gives what is free to jobs: first those that never ran, their fewest workers each; then
        the others that wait, by ``order``; then more to all, by ``order``, up to their limits.

        Args:
            grow: whether jobs that have workers in ``counts`` may get more.
        """
        problem = self._problem
        padded = [int(count) for count in counts]
        free = (self._whole - counts @ self._units).tolist()

        def fitting(j: int, most: int) -> int:
            for has, needs in self._needs[j]:
                most = min(most, int(free[has] / needs + 1e-9))
            return most

        def give(j: int, more: int) -> None:
            padded[j] += more
            for has, needs in self._needs[j]:
                free[has] -= more * needs

        new = [j for j in range(len(padded)) if problem.new[j]]
        for j in [*new, *(j for j in order if not problem.new[j])]:
            least = int(problem.least[j])
            if padded[j] == 0 and fitting(j, least) == least:
                give(j, least)
        for j in order:
            more = int(problem.limit[j]) - padded[j]
            if padded[j] and more > 0 and (grow or counts[j] == 0):
                give(j, max(fitting(j, more), 0))
        return np.array(padded, dtype=np.int64)

    def place(self, counts: Counts) -> PopulationMember:
        """Puts the workers on machines; those that do not fit are left out."""
        problem = self._problem
        free = problem.free.copy()
        placed = np.zeros_like(counts)
        placements: dict[int, JobPlacement] = {}
        stays = counts == self._present
        for j, (machines, usage) in self._usage.items():
            placement = problem.states[j].placement
            if stays[j] and placement is not None:
                placements[j] = placement
                placed[j] = counts[j]
            else:
                free[machines] += usage
        others = np.flatnonzero((counts > 0) & ~stays)
        for j in others[np.argsort(-counts[others], kind="stable")].tolist():
            state, workers = problem.states[j], int(counts[j])
            placement = pack(state, workers, free)
            while placement is None and workers > problem.least[j]:
                workers = max(workers // 2, int(problem.least[j]))
                placement = pack(state, workers, free)
            if placement is not None:
                take(free, state, placement)
                placements[j] = placement
                placed[j] = placement.workers
        return PopulationMember(counts, placed, self._genes(placements), placements)

    def _genes(self, placements: dict[int, JobPlacement]) -> Counts:
        genes = np.full(self._first[-1], _NOBODY, dtype=np.int64)
        filled = self._first[:-1].copy()
        for j in sorted(placements):
            for machine, workers, _ in placements[j].parts:
                # Workers of unlike demands can be more than the places; genes forget them.
                end = min(filled[machine] + workers, self._first[machine + 1])
                genes[filled[machine] : end] = j
                filled[machine] = end
        return genes

    def _crossed(self, one: PopulationMember, other: PopulationMember) -> tuple[Counts, Counts]:
        """Two children: each place from one parent, and from the other one."""
        mask = self._rng.random(len(one.genes)) < 0.5
        return (
            self._counted(np.where(mask, one.genes, other.genes)),
            self._counted(np.where(mask, other.genes, one.genes)),
        )

    def _counted(self, genes: Counts) -> Counts:
        counts = np.bincount(genes + 1, minlength=len(self._problem.states) + 1)[1:]
        return self._allowed(counts)

    def _allowed(self, counts: Counts) -> Counts:
        """Within the limits; jobs with too few workers have none."""
        within = np.minimum(counts, self._problem.limit)
        return np.where(within < self._problem.least, 0, within)

    def _mutated(self, counts: Counts) -> Counts:
        leaves = self._problem.may_leave & (self._rng.random(len(counts)) < _LEAVES)
        return np.where(leaves, 0, counts)

    # ---------------------------------------------------------------------------- the search
    def run(
        self, ancestors: Sequence[Counts], progress: Sequence[NDArray[np.float64]]
    ) -> list[PopulationMember]:
        """Lets the population live for one generation for each guess of the jobs' progress.

        It begins with the present schedule, then what earlier ones have become.

        Args:
            ancestors: workers by job of earlier schedules.

        Returns:
            The population, the lowest score first; of equal ones the oldest.
        """
        order = self.order(progress[0])
        present = self._allowed(self._present)
        first = [present, *(self._allowed(counts) for counts in ancestors[: POPULATION - 1])]
        first += [self._mutated(present) for _ in range(POPULATION - len(first))]
        population = self._live_on([], [self.pad(c, order) for c in first], progress[0])
        for rho in progress:
            order = self.order(rho)
            mixed = self._rng.permutation(len(population))
            bred = [
                child
                for one, other in zip(mixed[::2], mixed[1::2], strict=False)
                for child in self._crossed(population[one], population[other])
            ]
            bred += [self._mutated(member.counts) for member in population]
            population = self._live_on(population, [self.pad(c, order) for c in bred], rho)
        return population

    def _live_on(
        self,
        population: Sequence[PopulationMember],
        bred: Sequence[Counts],
        progress: NDArray[np.float64],
    ) -> list[PopulationMember]:
        """Those with the lowest scores, one of equal ones. Only they are put on machines, which
        takes longest.
        """
        members: dict[bytes, tuple[Counts, PopulationMember | None]] = {}
        scores: dict[bytes, float] = {}
        for wanted, member in [*((m.wanted, m) for m in population), *((c, None) for c in bred)]:
            key = wanted.tobytes()
            if key not in members:
                members[key] = (wanted, member)
                scores[key] = self.score(wanted, progress)
        best = sorted(members, key=scores.__getitem__)[:POPULATION]
        return [member or self.place(wanted) for wanted, member in map(members.__getitem__, best)]

    def order(self, progress: NDArray[np.float64]) -> list[int]:
        """Jobs by what remains of them with their fewest workers."""
        problem = self._problem
        jobs = np.arange(len(problem.states))
        rates = problem.rates[jobs, problem.least]
        remaining = self._remaining(problem.least, progress, rates)
        return [int(j) for j in np.argsort(remaining, kind="stable")]

    def score(self, counts: Counts, progress: NDArray[np.float64]) -> float:
        """Of a schedule: worker-seconds that remain of its jobs, and that its changes cost."""
        problem = self._problem
        rates = problem.rates[np.arange(len(counts)), counts]
        has = counts > 0
        changed = has & (self._present > 0) & (counts != self._present)
        remaining = self._remaining(counts, progress, rates)[has].sum()
        return float(remaining + problem.change_s * counts[changed].sum())

    def _remaining(
        self, counts: Counts, progress: NDArray[np.float64], rates: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        return remaining_worker_s(self._problem.done, counts, progress, np.maximum(rates, 1e-300))
