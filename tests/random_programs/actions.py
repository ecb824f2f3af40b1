"""All actions, by name."""

from __future__ import annotations

from random_programs import (
    aliases,
    faults,
    kept_gradients,
    modes,
    norms,
    optimizing,
    reads,
    subclasses,
    training,
    transforms,
)
from random_programs.registry import ACTIONS, Action, Place

__all__ = ["ACTIONS", "Action", "Place"]

# imported for what they put on the list
_MODULES = (
    aliases, faults, kept_gradients, modes, norms, optimizing, reads, subclasses, training,
    transforms,
)  # fmt: skip
