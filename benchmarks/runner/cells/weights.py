"""Whether systems that trained alike ended with equal weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

ROUNDS_GRADIENTS = {"ddp_bf16", "ddp_powersgd", "ddp_powersgd4", "int8", "auto"}
"""Systems that send fewer bytes."""

_ROUNDING = 1e-5
"""Sums are taken in another order."""
_OF_A_NORM = 0.1
"""So far two norms of the same gradients may be apart: PyTorch's vector_norm sums in float32. Of
100 million equal elements, as in an emulated gradient, it is 5 % too small, and in two parts 3 %.
"""


def same_weights(weights: Mapping[str, Sequence[Sequence[float]]], clipped: bool) -> bool:
    """Whether all systems and ranks agree, up to rounding; of a system that rounds gradients, the
    ranks.

    With clipping the norm scales every update, so that all weights of a system may differ from
    another's by one factor near 1.

    Args:
        weights: by system and rank.
    """
    rounded = [by_rank for system, by_rank in weights.items() if system in ROUNDS_GRADIENTS]
    if any(values != by_rank[0] for by_rank in rounded for values in by_rank):
        return False
    everything = [
        values
        for system, by_rank in weights.items()
        if system not in ROUNDS_GRADIENTS
        for values in by_rank
    ]
    if clipped:
        lengths = [math.hypot(*values) for values in everything]
        if any(not math.isclose(each, lengths[0], rel_tol=_OF_A_NORM) for each in lengths):
            return False
        everything = [
            [value / (length or 1.0) for value in values]
            for values, length in zip(everything, lengths, strict=True)
        ]
    return all(
        math.isclose(a, b, rel_tol=_ROUNDING)
        for values in everything
        for a, b in zip(everything[0], values, strict=True)
    )
