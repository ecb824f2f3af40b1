"""The time in which a job must have ended."""

from __future__ import annotations

from collections.abc import Sequence

from chaos.faults.fault import GOES_ON, Fault
from chaos.pace import BUSY, TIMEOUT_S

__all__ = ["bound_s"]

_MARGIN_S = 15.0  # for processes to notice and end, on a machine that is not busy
_GOING_ON_S = 30.0  # for the rest of a training that goes on, with new starts


def bound_s(faults: Sequence[Fault]) -> float:
    """Seconds from the last fault in which all must have ended, as busy as the machine is now."""
    work_s = _MARGIN_S + (_GOING_ON_S if any(f.must == GOES_ON for f in faults) else 0.0)
    return 2 * TIMEOUT_S + max((f.slow_end for f in faults), default=0.0) + work_s * BUSY
