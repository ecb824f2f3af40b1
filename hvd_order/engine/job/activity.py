"""What this rank waits in, for the stall warnings of ranks whose gradients wait for it meanwhile.

A stall has its cause where two ranks do different things: one registers parameters, or waits in a
collective, and another waits in ``step()``. Each alone can only name what it lacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hvd_order._native import _torch as native

__all__: list[str] = []

_texts: list[str] = []  # of all threads; the first began first and says most


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Tells the other ranks, if they ask, that this rank ``text`` (a verb, and what follows it)."""
    _texts.append(text)
    native.set_activity(_texts[0])
    try:
        yield
    finally:
        _texts.remove(text)
        native.set_activity(_texts[0] if _texts else "")


def now() -> str:
    """What this rank waits in; empty if nothing is known."""
    return _texts[0] if _texts else ""
