"""What a schedule still costs, by a guess of how far its jobs are."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvd_order.cluster.model.job import ClusterJob

__all__ = ["Lengths", "epoch_of", "remaining_worker_s"]

_LEAST_PROGRESS = 1e-3  # a sample of no progress would make a job endless


def epoch_of(job: ClusterJob) -> float:
    """Samples of an epoch; all of them for a job without epochs."""
    return min(job.epoch_samples, job.samples)


def remaining_worker_s(
    done: ArrayLike, workers: ArrayLike, progress: ArrayLike, samples_per_s: ArrayLike
) -> NDArray[np.float64]:
    """Workers by seconds until jobs end: y n (1/rho - 1) / x; their sum is a schedule's score.

    Source: Bian et al., "Online Evolutionary Batch Size Orchestration for Scheduling Deep Learning
    Workloads in GPU Clusters", SC 2021, as its public code has it.

    Args:
        done: y, samples trained.
        workers: n.
        progress: rho, the part of the whole job that is done, above 0.
        samples_per_s: x, of the n workers together.
    """
    y, n, rho, x = (
        np.asarray(a, dtype=np.float64) for a in (done, workers, progress, samples_per_s)
    )
    return y * n * (1 / rho - 1) / x


class Lengths:
    """Guesses how many epochs jobs take, from those that have ended.

    Progress of a job is Beta(a, b): a the epochs that it has done, b one more than those expected
    to come. ONES expects what a small network makes of the losses; losses are not known here, so
    the mean of ended jobs with the same model takes its place, or of all ended jobs.
    """

    def __init__(self) -> None:
        self._sums: dict[str | None, tuple[float, int]] = {}

    def ended(self, job: ClusterJob) -> None:
        """Learns from a job that has ended."""
        epochs = job.samples / epoch_of(job)
        for key in {job.model or None, None}:
            total, count = self._sums.get(key, (0.0, 0))
            self._sums[key] = (total + epochs, count + 1)

    def to_come(self, job: ClusterJob, epochs_done: float) -> float:
        """Epochs that are expected to come, at least one."""
        total, count = self._sums.get(job.model or None) or self._sums.get(None, (0.0, 0))
        mean = total / count if count else 0.0
        return 1.0 + max(mean - epochs_done, 0.0)

    def sample(
        self, done: NDArray[np.float64], to_come: NDArray[np.float64], rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """A progress of each job, by epochs done and to come."""
        # Beta wants more than 0; a job that has done nothing is taken to have done a little.
        drawn = rng.beta(np.maximum(done, _LEAST_PROGRESS), to_come)
        return np.clip(drawn, _LEAST_PROGRESS, 1.0)
