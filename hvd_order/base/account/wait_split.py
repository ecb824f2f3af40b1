"""Splits the time that a reader waits for a slice by its cause."""

from __future__ import annotations

from dataclasses import dataclass

__all__: list[str] = []


@dataclass(frozen=True)
class WaitParts:
    """Parts of one wait, in the order in which they pass; their sum is the wait.

    Attributes:
        late: until the last rank had the gradient ready; that rank is to blame.
        queue: after that, until the slice was handed to the transport; what was sent meanwhile is
            to blame.
        transfer: the rest; the link is to blame, or the size of the slice.
    """

    late: float
    queue: float
    transfer: float

    @property
    def exposed(self) -> float:
        """Length of the wait."""
        return self.late + self.queue + self.transfer


def split_wait(begin: float, end: float, ready_last: float, issued: float) -> WaitParts:
    """Splits the wait of a reader over ``[begin, end]``.

    Args:
        begin, end: of the wait; no time has passed if the end comes first.
        ready_last: when the last rank had the gradient ready.
        issued: when the slice was handed to the transport. One before ``ready_last`` counts as
            ``ready_last``: a rank may hand a slice over while others still compute it, and clocks
            of ranks agree within their error only.

    All arguments and the result are in one unit, on one clock.
    """
    end = max(begin, end)
    ready = min(max(begin, ready_last), end)
    sent = min(max(ready, issued), end)
    return WaitParts(ready - begin, sent - ready, end - sent)
