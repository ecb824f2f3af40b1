"""Units in which times are shown."""

from __future__ import annotations

__all__ = ["time_unit"]

_UNITS = (("days", 86400.0, 4.0), ("hours", 3600.0, 2.0), ("minutes", 60.0, 3.0))


def time_unit(longest_s: float) -> tuple[str, float]:
    """Name of the unit for times up to a longest one, and its seconds."""
    for name, seconds, least in _UNITS:
        if longest_s >= least * seconds:
            return name, seconds
    return "s", 1.0
