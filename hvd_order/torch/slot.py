"""What the engine keeps about one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__: list[str] = []

_NOWHERE = torch.empty(0)


@dataclass(eq=False)
class Slot:
    """One parameter, its gradient's place in the buffers, and where both are in the step.

    Attributes:
        wire: the gradient's place in its buffer, as it travels (compressed or not).
        gradient: what becomes ``parameter.grad``; the same memory as ``wire`` unless compressed.
        use_flag: see gradient_buffers.py; 1 element.
        tensor: TensorId, the place in consumption order.
    """

    parameter: torch.nn.Parameter
    name: str
    wire: torch.Tensor = _NOWHERE
    gradient: torch.Tensor = _NOWHERE
    use_flag: torch.Tensor = _NOWHERE
    tensor: int = -1

    passes_to_go: int = 1
    compression_context: Any = None
    ready_s: float = 0.0  # when it was handed to the engine, time.monotonic()
    sent: bool = False  # handed to the engine in this step
    finished: bool = False  # and summed, and visible in `gradient`
    absent: bool = False  # this rank had no gradient to contribute
    cleared: bool = False  # absent, and its owner has called zero_grad since
    used: bool = True  # some rank had one; known when finished
    update_pending: bool = False  # step() has been called, the parameter has not been updated
    sparse: bool = False  # exchanged by sparse.py instead of the buffers
    deferrable: bool = False  # seen to be read from Python after an update

    def begin_step(self, passes: int) -> None:
        """Makes the slot ready for the gradients of the next step."""
        self.passes_to_go = passes
        self.sent = False
        self.finished = False
        self.absent = False
        self.cleared = False
        self.used = True
