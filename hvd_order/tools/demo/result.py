"""Data exchanged by the demo's processes: options as input, measurements as output."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """What the workers are to do.

    Attributes:
        steps: training steps of each system.
        block: steps each system trains before it is the other's turn.
        recorded: steps at the end that are traced and not timed.
        sequences_a_rank: sequences a rank reads each step.
        trace_path: Chrome trace of rank 0.
        result_path: where rank 0 writes the ``DemoResult``.
    """

    steps: int
    block: int
    recorded: int
    sequences_a_rank: int
    trace_path: str
    result_path: str

    def to_json(self) -> str:
        """One line that a worker takes as its argument."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class DemoResult:
    """Measurements; lists of two hold the system to compare with first, then hvd_order.

    Attributes:
        systems: what the two are called.
        size: number of ranks.
        block_steps: steps in a timed block.
        weights: parameters of the model.
        train_loss: per system, nats a token at each step, mean of all ranks.
        validation_loss: per system, nats a token after the last step.
        step_ms: per system, mean step time of each timed block; blocks with the same number ran
            one right after the other.
        largest_difference: of the two systems' final weights, relative to the largest weight of
            the same tensor; the worst of all ranks.
        ranks_equal: per system, whether all ranks hold bitwise the same weights.
        versions: of what the numbers depend on.
    """

    systems: list[str]
    size: int
    block_steps: int
    weights: int
    train_loss: list[list[float]]
    validation_loss: list[float]
    step_ms: list[list[float]]
    largest_difference: float
    ranks_equal: list[bool]
    versions: dict[str, str]

    def write(self, path: Path) -> None:
        """Writes the result as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> DemoResult:
        """Reads what ``write`` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
