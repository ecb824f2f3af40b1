"""Forward and backward passes, from moments that the exchange of gradients knows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hvd_order.engine.tracing.events import Event, event

__all__: list[str] = []

MomentKind = Literal["read", "backward", "backward_end", "step", "deferred"]


@dataclass(frozen=True)
class Moment:
    """Something that happened to one model.

    Attributes:
        kind: "read": a parameter is read whose update ``step()`` had deferred. "backward": the
            first gradient of a backward pass has come. "backward_end": the pass has ended.
            "step": ``step()`` has updated all. "deferred": it has left updates to readers.
        tensors: of "read": the parameters, by their number in the model.
    """

    at_ns: int
    kind: MomentKind
    model: int
    tensors: Sequence[int] = ()


def passes(moments: Iterable[Moment], own: Iterable[str]) -> list[Event]:
    """Returns the passes that the moments bound.

    A forward pass begins with the first read of a deferred parameter, at the end of a ``step()``
    that has updated all, or at the end of a backward pass whose step has not come yet (gradients
    add up). It ends with the first gradient. A backward pass of several models is one.

    Args:
        moments: in the order in which they came.
        own: names of passes that the program records itself; these are left out.
    """
    own = set(own)
    found: list[Event] = []
    forward_ns: int | None = None
    backward_ns: int | None = None
    under_way: set[int] = set()  # models
    for moment in moments:
        at_ns = moment.at_ns
        if moment.kind == "backward":
            if forward_ns is not None:
                found.append(event("compute", "forward", forward_ns, at_ns, {}))
            if not under_way or under_way == {moment.model}:  # else the pass of another model
                backward_ns = at_ns
            under_way.add(moment.model)
            forward_ns = None
        elif moment.kind == "backward_end":
            under_way.discard(moment.model)
            if backward_ns is not None and not under_way:
                found.append(event("compute", "backward", backward_ns, at_ns, {}))
                forward_ns, backward_ns = at_ns, None
        elif moment.kind == "step":
            forward_ns = at_ns
        elif moment.kind == "deferred":
            forward_ns = None
        elif forward_ns is None and not under_way:
            forward_ns = at_ns
    return [each for each in found if each["name"] not in own]
