"""In which order parameters are read after an update: watched in one step, not guessed.

Between the first step's update and the next gradient, every parameter is armed with the read guard,
and the guard notes each parameter's first reader. That order, which includes readers outside of any
module (weight averaging, functional calls), becomes the consumption order.
"""

from __future__ import annotations

from hvd_order.torch.slot import Slot

__all__: list[str] = []


class ReadOrder:
    """Who was read when.

    Attributes:
        watching: reads are being noted.
        complete: the order is known.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.watching = False
        self.complete = False
        self._started = False
        self._seen: dict[Slot, None] = {}  # an ordered set

    def start(self) -> None:
        """Begins to watch."""
        self.watching = True
        self._started = True

    @property
    def started(self) -> bool:
        """Whether watching has begun, and perhaps ended."""
        return self._started

    def note(self, slot: Slot) -> None:
        """A read of ``slot``; only the first one while watching counts."""
        if self.watching:
            self._seen.setdefault(slot)

    def close(self) -> None:
        """A gradient has come: whoever reads from now on reads for the backward pass."""
        self.watching = False

    def finish(self) -> list[Slot]:
        """Takes what was seen as the order."""
        self.watching = False
        self.complete = True
        return list(self._seen)
