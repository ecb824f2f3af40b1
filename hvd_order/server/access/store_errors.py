"""What errors of PyTorch's store say."""

from __future__ import annotations

__all__ = ["first_line"]


def first_line(error: Exception) -> str:
    """The text without the frames of the C++ stack that PyTorch puts below it."""
    return str(error).strip().partition("\n")[0]
