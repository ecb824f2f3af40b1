"""In which order parameters are read after an update: watched, not guessed.

Parameters are armed with the read guard between an update and the next gradient, and the guard
notes each parameter's first reader. That order, which includes readers outside of any module
(weight averaging, functional calls), becomes the consumption order.

A single step may mislead: a debugging read, a layer that was skipped. So the order that the second
step gave is only the first estimate. Later steps are watched as well, more and more rarely, each
watched order is merged into the estimate, and where a watched step has confirmed an estimate that
is not in use, the ranks take it (learning.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []


class ReadOrder:
    """Who was read when.

    Attributes:
        watching: every first read after an update is being noted.
        complete: a first estimate is in use.
        estimate: the order, as far as it is known.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.watching = False
        self.complete = False
        self.estimate: list[ParameterEntry] = []
        self._seen: dict[ParameterEntry, float] = {}  # by their first read

    def watch(self) -> None:
        """Begins to watch."""
        self.watching = True
        self._seen.clear()

    @property
    def reads(self) -> int:
        """How many parameters have been read while watching."""
        return len(self._seen)

    def note(self, entry: ParameterEntry, reads: int | None = None) -> None:
        """A read of ``entry``; only the first one while watching counts.

        Args:
            reads: how many parameters had been read before; None: all that are known.
        """
        if self.watching:
            place = len(self._seen) if reads is None else reads - 0.5
            self._seen[entry] = min(place, self._seen.get(entry, place))

    def close(self) -> None:
        """A gradient has come: whoever reads from now on reads for the backward pass."""
        self.watching = False

    @property
    def seen(self) -> list[ParameterEntry]:
        """What was read while watching, in order."""
        return sorted(self._seen, key=self._seen.__getitem__)

    def take(self, order: Sequence[ParameterEntry]) -> None:
        """Takes the first estimate."""
        self.watching = False
        self.complete = True
        self.estimate = list(order)

    def confirm(self) -> bool:
        """Merges the order of the step that was watched into the estimate.

        Returns:
            Whether the estimate was right as it was.
        """
        self.watching = False
        merged = merge(self.estimate, self.seen)
        self._seen.clear()
        is_right = merged == self.estimate
        self.estimate = merged
        return is_right


def merge(order: Sequence[ParameterEntry], seen: Sequence[ParameterEntry]) -> list[ParameterEntry]:
    """``seen`` in its order; what it lacks stays behind its predecessor in ``order``."""
    is_seen = set(seen)
    behind: dict[ParameterEntry | None, list[ParameterEntry]] = {}
    last: ParameterEntry | None = None
    for entry in order:
        if entry in is_seen:
            last = entry
        else:
            behind.setdefault(last, []).append(entry)
    merged = list(behind.get(None, ()))
    for entry in seen:
        merged += [entry, *behind.get(entry, ())]
    return merged
