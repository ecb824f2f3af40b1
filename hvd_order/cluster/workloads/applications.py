"""What Pollux measured of six applications, and jobs of them.

Read in petuum/adaptdl, branch osdi21-artifact, simulator (Apache-2.0; Qiao et al., OSDI 2021):
epochs (applications.py); smallest and largest batch, and batches of one worker that were measured
(traces); samples of an epoch, as the progress of the last epoch times the smallest batch over the
epochs (traces/APP/validation-*.csv); the noise scale, as the median over the epochs of the run with
the smallest stored batch, smallest batch times grad_var over grad_sqr.

Fitted by ``fit_ring``: the times of a step, to the rows in data/pollux-measurements.csv. Rows of
ncf, and rows of deepspeech2 on fewer than six nodes, were read in a copy of the traces
(czq693497091/DeepBoot, which has no licence) and are not shipped; nothing was known of several
workers on one node for these two, so their exchange there costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_order.predict.measurements.ring import Ring

__all__ = ["APPLICATIONS", "Application", "MeasuredSpeed"]

_MOST_WORKERS = 64  # 16 nodes with 4 GPUs: no more were measured


@dataclass(frozen=True)
class MeasuredSpeed:
    """Speed of an all-reduce job by a formula of its steps.

    A worker whose share of the batch is more than fits into its memory takes it in several passes,
    and exchanges gradients after the last, as in the artifact's simulator.

    Attributes:
        most_local: samples of a worker's pass.
    """

    formula: Ring
    most_local: int

    def samples_per_s(self, workers: int, servers: int, machines: int, batch: int) -> float:
        """Speed of all workers together."""
        local = batch / workers
        passes = max(math.ceil(local / self.most_local - 1e-9), 1)
        part = local / passes
        step_s = self.formula.step_s(part, workers, machines)
        step_s += (passes - 1) * self.formula.step_s(part, 1, 1)
        return batch / step_s


@dataclass(frozen=True)
class Application:
    """An application.

    Attributes:
        epochs: until it is done, at the smallest batch.
        epoch_samples: samples of an epoch.
        least_batch, most_batch: of all workers.
        least_local, most_local: of one worker's pass.
        noise_scale: gradient noise scale, in samples.
        formula: of the time of a step.
    """

    epochs: int
    epoch_samples: int
    least_batch: int
    most_batch: int
    least_local: int
    most_local: int
    noise_scale: float
    formula: Ring

    @property
    def speed(self) -> MeasuredSpeed:
        """Speed of its jobs."""
        return MeasuredSpeed(self.formula, self.most_local)

    @property
    def most_workers(self) -> int:
        """Workers that the largest batch feeds, up to what was measured."""
        return min(self.most_batch // self.least_local, _MOST_WORKERS)

    def samples(self, batch: int) -> float:
        """Samples to train with a batch.

        As many epochs as with the smallest batch, but samples of a larger one are worth less:
        Pollux, section 2.2.
        """
        worth = (self.noise_scale + self.least_batch) / (self.noise_scale + batch)
        return self.epochs * self.epoch_samples / worth


APPLICATIONS = {
    "bert": Application(
        2, 88_644, 12, 384, 4, 12, 770,
        Ring(0.22328, 0.058254, 1.04754, 0.19916, 2.25, 0.10665, 0.068814),
    ),
    "cifar10": Application(
        100, 50_000, 128, 4096, 32, 1024, 7_700,
        Ring(0.020369, 0.00064985, 0.07353, 0.024588, 2.0, 0.026948, 0.0024538),
    ),
    "deepspeech2": Application(
        80, 7_135, 20, 640, 10, 80, 24_000,
        Ring(0.19078, 0.025488, 0.56809, 0.17995, 2.75),
    ),
    "imagenet": Application(
        90, 1_281_169, 200, 6400, 20, 200, 11_400,
        Ring(0.071901, 0.0043126, 0.19998, 0.078464, 3.25, 0.10595, 0.0),
    ),
    "ncf": Application(
        10, 4_970_854, 256, 32_768, 32, 32_768, 13_000_000,
        Ring(0.0075104, 4.5812e-07, 0.008208, 0.0051715, 1.0),
    ),
    "yolov3": Application(
        50, 16_551, 8, 128, 4, 8, 550,
        Ring(0.17625, 0.026513, 0.57176, 0.20287, 1.75, 0.0, 0.10861),
    ),
}  # fmt: skip
"""By the names that Pollux' workloads use."""
