"""The order in which parameters are read after an update, by observation.

Parameters are armed with the read guard between an update and the next gradient, and the guard
records the first reader of each parameter. That order becomes the consumption order; it includes
readers outside of any module (weight averaging, functional calls).

A single step may mislead: a debugging read, a skipped layer. So the order of the second step is
only the first estimate. Later steps are watched as well, more and more rarely, and each watched
order is merged into the estimate. When a watched step has confirmed an estimate that is not in
use, the ranks adopt it (warm_up.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []


class ReadOrder:
    """Observed order of the first reads.

    Attributes:
        watching: every first read after an update is being recorded.
        complete: a first estimate is in use.
        estimate: the order, as far as it is known.
    """

    def __init__(self) -> None:
        """Starts without observations."""
        self.watching = False
        self.complete = False
        self.estimate: list[ParameterEntry] = []
        self._seen: dict[ParameterEntry, float] = {}  # place of the first read

    def watch(self) -> None:
        """Starts watching."""
        self.watching = True
        self._seen.clear()

    @property
    def reads(self) -> int:
        """Number of parameters that have been read while watching."""
        return len(self._seen)

    def note(self, entry: ParameterEntry, reads: int | None = None) -> None:
        """Records a read of ``entry``; only the first one while watching counts.

        Args:
            reads: number of parameters read before this one; None: all recorded ones.
        """
        if self.watching:
            place = len(self._seen) if reads is None else reads - 0.5
            self._seen[entry] = min(place, self._seen.get(entry, place))

    def close(self) -> None:
        """Stops watching when a gradient has come: later reads belong to the backward pass."""
        self.watching = False

    @property
    def seen(self) -> list[ParameterEntry]:
        """Parameters read while watching, in order."""
        return sorted(self._seen, key=self._seen.__getitem__)

    def take(self, order: Sequence[ParameterEntry]) -> None:
        """Sets the first estimate."""
        self.watching = False
        self.complete = True
        self.estimate = list(order)

    def confirm(self) -> bool:
        """Merges the order of the watched step into the estimate.

        Returns:
            Whether the estimate was already right.
        """
        self.watching = False
        merged = merge(self.estimate, self.seen)
        self._seen.clear()
        is_right = merged == self.estimate
        self.estimate = merged
        return is_right


def merge(order: Sequence[ParameterEntry], seen: Sequence[ParameterEntry]) -> list[ParameterEntry]:
    """``seen`` in its order; each missing entry follows its predecessor in ``order``."""
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
