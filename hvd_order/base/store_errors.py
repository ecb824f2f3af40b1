"""Text of errors of PyTorch's store."""

from __future__ import annotations

__all__ = ["first_line"]


def first_line(error: Exception) -> str:
    """Returns the text without the frames of the C++ stack that PyTorch appends."""
    return str(error).strip().partition("\n")[0]
