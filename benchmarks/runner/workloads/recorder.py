"""When layers ran."""

from __future__ import annotations


class Recorder:
    """One list of (layer, "forward" or "backward", begin, end), in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, float, float]] = []
