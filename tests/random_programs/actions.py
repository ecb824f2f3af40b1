"""All actions, by name."""

from __future__ import annotations

from random_programs import aliases, modes, optimizing, reads, training
from random_programs.registry import ACTIONS, Action, Place

__all__ = ["ACTIONS", "Action", "Place"]

_MODULES = (aliases, modes, optimizing, reads, training)  # imported for what they put on the list
