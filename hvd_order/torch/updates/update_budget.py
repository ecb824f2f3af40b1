"""Number of bytes to update at a time while a reader waits for its own parameter."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []

_AIM_S = 1e-3  # a reader whose gradient comes meanwhile waits half of it
_FIRST_BYTES = 2**20


class UpdateBudget:
    """Selects parameters whose update takes about a millisecond of the calling thread.

    On a CPU an update costs the time of its bytes; on an accelerator, next to nothing but the
    call. So the right number of bytes is measured on the updates as they run.
    """

    def __init__(self) -> None:
        """Starts with one MiB."""
        self._bytes: float = _FIRST_BYTES

    def of(self, entries: Iterable[ParameterEntry]) -> list[ParameterEntry]:
        """The first of ``entries`` that fit into one update; at least one if there is any."""
        taken = []
        room = self._bytes
        for entry in entries:
            taken.append(entry)
            room -= entry.size_bytes
            if room <= 0:
                break
        return taken

    @contextlib.contextmanager
    def timed(self, entries: Sequence[ParameterEntry]) -> Iterator[None]:
        """Measures the update of ``entries`` that runs in this context."""
        begin = time.monotonic()
        yield
        too_small = sum(entry.size_bytes for entry in entries) < self._bytes / 2
        factor = _AIM_S / max(time.monotonic() - begin, 1e-9)
        if not (too_small and factor > 1):
            self._bytes *= min(max(factor, 0.5), 2.0)
