"""What ranks agree on when a model is registered, and when a step needs it. All functions are
collective.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hvd_order.base.same_model import check_same
from hvd_order.engine.job import group_collectives
from hvd_order.engine.model_channel import ModelChannel

__all__: list[str] = []


@dataclass(frozen=True)
class Agreed:
    """The agreement of all ranks.

    Attributes:
        model: an id that was free on every rank, and is now this model's.
        order: rank 0's order, as indices into this rank's list.
        only_model: whether no rank has another model.
    """

    model: int
    order: list[int]
    only_model: bool


def agree(channel: ModelChannel, mine: Sequence[tuple[str, tuple[int, ...], str]]) -> Agreed:
    """Checks that all ranks have the same parameters, and adopts rank 0's order.

    The caller has the engine's turn.

    Args:
        channel: of the model.
        mine: (name, shape, dtype) of each parameter.

    Raises:
        ModelMismatch: on every rank; names the first parameter that differs and the ranks.
    """
    host = channel.host
    everyone = channel.gather("its parameters", list(mine))
    check_same(everyone, host.ranks)

    def reserve(group: dist.ProcessGroup) -> tuple[int, set[int]]:
        # Here, so that two models whose threads come at once on some ranks get different ids.
        own = group_collectives.pickled(sorted(host.models))
        told = group_collectives.gather_bytes(own, group, "ids of models")
        taken: set[int] = set().union(
            *(
                group_collectives.unpickled(data, rank, "ids of models")
                for rank, data in zip(host.ranks, told, strict=True)
            )
        )
        return host.take_id(taken), taken

    model, taken = channel.together("an id", reserve)
    if taken:
        _share(channel)
    place = {name: i for i, (name, _, _) in enumerate(mine)}
    order = [place[name] for name, _, _ in everyone[0]]
    return Agreed(model, order, only_model=not taken)


def _share(channel: ModelChannel) -> None:
    """Prepares the engine for a second model, which a planned order does not cover."""
    host = channel.host
    if not host.shared:
        host.shared, host.shared_on = True, threading.current_thread()
    if host.agreement == "planned" and host.first_agreement != "planned":
        issued: list[int | None] = channel.gather("the end of a plan", host.engine.hold_plan())
        host.end_plan(max(each or 0 for each in issued))


def union(channel: ModelChannel, what: str, indices: Iterable[int]) -> list[int]:
    """Returns all indices that any rank has, sorted."""
    return sorted(set().union(*channel.gather(what, set(indices))))


def average_loss(channel: ModelChannel, loss: Any, absent: bool = False) -> Any:
    """Returns the mean of the ranks' losses, in the type of ``loss``; None stays None.

    An optimizer that uses the loss must decide the same on every rank.

    Args:
        channel: of the model.
        loss: this rank's loss.
        absent: this rank has joined and has no loss.
    """
    if absent:
        channel.gather("the loss of a closure", None)
    if loss is None:
        return None
    everyone = channel.gather("the loss of a closure", float(loss))
    values = [value for value in everyone if value is not None]
    mean = sum(values) / len(values)
    return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean
