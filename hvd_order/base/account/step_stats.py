"""Numbers of a training's last steps, as ``optimizer.stats()`` returns them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["StepStats"]


@dataclass(frozen=True)
class StepStats:
    """Where the time of this rank's steps goes, and which rank is slow.

    Times are seconds: means of the last ten steps without the shortest and longest quarter.
    ``compute_s + late_s + queue_s + transfer_s + update_s + host_s`` is ``step_s``.

    Attributes:
        steps: steps of this optimizer so far.
        step_s: from the first gradient of a step to the first gradient of the next one.
        compute_s: forward and backward pass, without waits and updates.
        late_s: exposed, because a rank had not computed a gradient that this rank waited for.
        queue_s: exposed, because other slices travelled first.
        transfer_s: exposed, because the slice travelled.
        update_s: the user's optimizer.
        host_s: outside the passes: from the end of ``step()`` to the first read of a parameter (the
            loader), and from the end of the backward pass to the end of ``step()``.
        loader_s: of ``host_s``, the part before the first read.
        overlap: the part of communication during which this rank computed or updated; 0 to 1.
        inversion_s: of ``queue_s``, the part in which less urgent slices were sent.
        wire_bytes: of all gradients of one step, as this rank hands them over.
        slice_bytes, credit_bytes: the settings in use.
        way: how gradients are sent, for example "planned order, all-reduces split".
        slow_rank: the rank that holds up the others; -1: none.
        slow_cause: what makes it slow: "loader", "forward pass", "backward pass", "cores",
            "update", "host" or "link"; empty: nothing.
        slow_detail: the first late layer, or the host behind the slow link; may be empty.
        slow_s: what this rank costs each step.
        without_s: the step without that delay.
        clock_error_s: largest error of the clocks' comparison, on any rank.
    """

    steps: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0
    late_s: float = 0.0
    queue_s: float = 0.0
    transfer_s: float = 0.0
    update_s: float = 0.0
    host_s: float = 0.0
    loader_s: float = 0.0
    overlap: float = 0.0
    inversion_s: float = 0.0
    wire_bytes: int = 0
    slice_bytes: int = 0
    credit_bytes: int = 0
    way: str = ""
    slow_rank: int = -1
    slow_cause: str = ""
    slow_detail: str = ""
    slow_s: float = 0.0
    without_s: float = 0.0
    clock_error_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Communication that the step waited for: late, queue and transfer."""
        return self.late_s + self.queue_s + self.transfer_s

    def as_dict(self) -> dict[str, float]:
        """Returns the numbers by name, ``exposed_s`` among them, for loggers of metrics."""
        values = {**dataclasses.asdict(self), "exposed_s": self.exposed_s}
        return {name: float(value) for name, value in values.items() if not isinstance(value, str)}
