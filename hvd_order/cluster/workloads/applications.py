"""What Pollux measured of six applications, and jobs of them.

Read in petuum/adaptdl, branch osdi21-artifact, simulator (Apache-2.0; Qiao et al., OSDI 2021):
epochs (applications.py); smallest and largest batch, and batches of one worker that were measured
(traces); samples of an epoch, as the progress of the last epoch times the smallest batch over the
epochs (traces/APP/validation-*.csv); the noise scale, as the median over the epochs of the run with
the smallest stored batch, smallest batch times grad_var over grad_sqr.

Fitted by ``fit_step_time``: the times of a step, to the rows in data/pollux-measurements.csv.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_order.planning.predict.measurements.ring import Ring

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
        Ring(0.22104, 0.058558, 1.2168, 0.17908, 2.2628, 0.10545, 0.067862),
    ),
    "cifar10": Application(
        100, 50_000, 128, 4096, 32, 1024, 7_700,
        Ring(0.013319, 0.00075553, 0.12492, 0.019505, 3.1908, 0.035797, 0.0051386),
    ),
    "deepspeech2": Application(
        80, 7_135, 20, 640, 10, 80, 24_000,
        Ring(0.091291, 0.030464, 0.69108, 0.13605, 3.1722, 0.34901, 0.093369),
    ),
    "imagenet": Application(
        90, 1_281_169, 200, 6400, 20, 200, 11_400,
        Ring(0.069441, 0.0044464, 0.3103, 0.049756, 2.6785, 0.0079308, 0.026408),
    ),
    "ncf": Application(
        10, 4_970_854, 256, 32_768, 32, 32_768, 13_000_000,
        Ring(0.0072944, 5.7744e-07, 0.013523, 0.0033432, 1, 0.0017759, 0.001145),
    ),
    "yolov3": Application(
        50, 16_551, 8, 128, 4, 8, 550,
        Ring(0.18771, 0.02717, 0.65895, 0.18554, 1.6593, 0.0099416, 0.11393),
    ),
}  # fmt: skip
"""By the names that Pollux' workloads use."""
