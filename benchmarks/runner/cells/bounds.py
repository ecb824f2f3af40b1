"""The shortest steps that a cell's measured times allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_order.planning.bounds.bound import chain_optimum_s
from hvd_order.planning.bounds.clipped_bound import (
    clipped_chain_optimum_s,
    late_gather_chain_s,
    unsplit_clipped_chain_s,
)

Events = Sequence[tuple[str, str, float, float]]
"""Of a recorded local step, or several, see recorder.py."""


@dataclass(frozen=True)
class ClipBounds:
    """What those can reach who do not all that the optimum does; with clipping by the global norm.

    Attributes:
        late_gathers_s: all-reduces are split, but no all-gather begins before the norm is known.
        unsplit_s: gradients travel whole and all arrive before the norm, as with DDP.
    """

    late_gathers_s: float
    unsplit_s: float


def optimum_s(events: Events, layer_bytes: Sequence[int], local_s: float, wire_s: float) -> float:
    """The shortest step of any synchronous method.

    Args:
        events: of the local step.
        layer_bytes: of each layer's gradient.
        local_s: local step time.
        wire_s: of an all-reduce of all gradients.
    """
    return chain_optimum_s(*_chain(events, layer_bytes, local_s, wire_s))


def clipped_optimum_s(
    events: Events, layer_bytes: Sequence[int], local_s: float, wire_s: float
) -> tuple[float, ClipBounds]:
    """As :func:`optimum_s`, with clipping by the global norm in every step.

    The exchange of the norm counts as nothing.
    """
    chain = _chain(events, layer_bytes, local_s, wire_s)
    bounds = ClipBounds(late_gather_chain_s(*chain), unsplit_clipped_chain_s(*chain))
    return clipped_chain_optimum_s(*chain), bounds


def layer_s(events: Events, local_s: float) -> list[tuple[float, float]]:
    """Forward and backward time of each layer.

    Args:
        events: of the local step.
        local_s: step time, which is spread over the layers: it includes the optimizer, and
            clipping.
    """
    names = list(dict.fromkeys(name for name, kind, _, _ in events if kind == "forward"))
    took = {(name, kind): 0.0 for name in names for kind in ("forward", "backward")}
    for name, kind, begin, end in events:
        took[name, kind] += end - begin
    scale = local_s / sum(took.values())
    return [(scale * took[name, "forward"], scale * took[name, "backward"]) for name in names]


def _chain(
    events: Events, layer_bytes: Sequence[int], local_s: float, wire_s: float
) -> tuple[list[float], list[float], list[float]]:
    forward_s, backward_s = zip(*layer_s(events, local_s), strict=True)
    share_s = [wire_s * size / sum(layer_bytes) for size in layer_bytes]
    return list(forward_s), list(backward_s), share_s
