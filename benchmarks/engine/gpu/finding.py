"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """What a check measured on one rank.

    Attributes:
        text: the figures in words, each with its limit.
        figures: all of them, in seconds, bytes a second or shares.
        missed: the limits that were missed, in words; empty if none was.
    """

    text: str
    figures: Mapping[str, float] = field(default_factory=dict)
    missed: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json`."""
        return asdict(self)
