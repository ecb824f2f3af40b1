"""What the completion of a job is worth, by the time since its arrival."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvd_order.base.errors import InvalidUsage

__all__ = ["Constant", "Sigmoid", "Steps", "Utility"]

Utility = Callable[[float], float]
"""Worth of a completion by its latency in seconds. Never grows with the latency."""


@dataclass(frozen=True)
class Constant:
    """Worth the same at any time."""

    value: float = 1.0

    def __call__(self, latency_s: float) -> float:
        """Worth of a completion."""
        return self.value


@dataclass(frozen=True)
class Sigmoid:
    """``value / (1 + exp(slope (latency - due)))``.

    Source: Bao et al., "Online Job Scheduling in Distributed Machine Learning Clusters", INFOCOM
    2018, section VI: slope 0 for jobs that time does not matter to, 0.01 to 1 a slot for those that
    it does, 4 to 6 for urgent ones.

    Attributes:
        value: worth of an early completion, with a slope of 0 twice the worth at any time.
        slope: loss, per second.
        due_s: latency at which half the worth is lost.
    """

    value: float
    slope: float
    due_s: float

    def __post_init__(self) -> None:
        if self.value < 0 or self.slope < 0:
            raise InvalidUsage(f"a utility of value {self.value} and slope {self.slope}; neither "
                               "may be negative")  # fmt: skip

    def __call__(self, latency_s: float) -> float:
        """Worth of a completion."""
        exponent = self.slope * (latency_s - self.due_s)
        return self.value / (1 + math.exp(min(exponent, 700.0)))


@dataclass(frozen=True)
class Steps:
    """A table: ``values[k]`` for a latency from ``k`` to ``k + 1`` slots; 0 behind its end."""

    values: Sequence[float]
    slot_s: float = 1.0

    def __call__(self, latency_s: float) -> float:
        """Worth of a completion."""
        slot = int(latency_s / self.slot_s + 1e-9)
        return self.values[slot] if slot < len(self.values) else 0.0
