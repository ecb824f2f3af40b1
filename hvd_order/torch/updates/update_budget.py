"""Number of bytes to update at a time while a reader waits for its own parameter."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []

_AIM_S = 1e-3  # a reader whose gradient comes meanwhile waits half of it
_FIRST_BYTES = 2**20
# Adam reads and writes 7 times the bytes of its parameters: this takes an accelerator with 1 to
# 4 TB/s of memory bandwidth 0.1 to 0.5 ms, and the host the launch of a few kernels.
_DEVICE_BYTES = 64 * 2**20


class UpdateBudget:
    """Selects parameters whose update takes about a millisecond of the calling thread.

    On a CPU an update costs the time of its bytes, so the right number of bytes is measured on the
    updates as they run. On an accelerator a host clock sees only the launch, so the number is
    fixed.
    """

    def __init__(self) -> None:
        """Starts with one MiB on the CPU."""
        self._bytes: float = _FIRST_BYTES

    def of(self, entries: Iterable[ParameterEntry]) -> list[ParameterEntry]:
        """The first of ``entries`` that fit into one update; at least one if there is any."""
        taken = []
        used = 0.0  # share of the budget
        for entry in entries:
            taken.append(entry)
            used += entry.size_bytes / (_DEVICE_BYTES if entry.on_device else self._bytes)
            if used >= 1:
                break
        return taken

    @contextlib.contextmanager
    def timed(self, entries: Sequence[ParameterEntry]) -> Iterator[None]:
        """Measures the update of ``entries`` that runs in this context."""
        begin = time.monotonic()
        yield
        if any(entry.on_device for entry in entries):
            return
        too_small = sum(entry.size_bytes for entry in entries) < self._bytes / 2
        factor = _AIM_S / max(time.monotonic() - begin, 1e-9)
        if not (too_small and factor > 1):
            self._bytes *= min(max(factor, 0.5), 2.0)
