"""Errors on their way through TensorFlow, which knows its own classes only."""

from __future__ import annotations

import re

from hvd_order import errors

__all__ = ["translated"]

_KINDS: dict[str, type[Exception]] = {
    **{
        name: getattr(errors, name)
        for name in errors.__all__
        if name not in ("CommitLost", "HostsUpdatedInterrupt")
    },
    "NotImplementedError": NotImplementedError,
    "ValueError": ValueError,
}
_PATTERN = re.compile(rf"\b({'|'.join(_KINDS)}): (.*)", re.DOTALL)


def translated(error: Exception) -> Exception:
    """The error that an operator of ours ended with; TensorFlow's own stays as it is."""
    found = _PATTERN.search(str(error))
    if found is None:
        return error
    kind, text = found.groups()
    text = re.sub(r"\s*\[Op:\w+\].*", "", text, flags=re.DOTALL)  # added in eager mode
    return _KINDS[kind](text)
