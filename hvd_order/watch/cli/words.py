"""Words that both commands print."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, what: str) -> str:
    """Returns "1 rank", "2 ranks"."""
    return f"{number} {what}" + ("s" if number != 1 else "")
