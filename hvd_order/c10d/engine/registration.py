"""What the ranks tell each other once, when a model is registered. All functions are collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_order.c10d.engine.engine_host import EngineHost
from hvd_order.c10d.job import group_collectives, request_errors
from hvd_order.errors import HorovodInternalError, PeerLost
from hvd_order.same_model import check_same

__all__: list[str] = []


@dataclass(frozen=True)
class Agreed:
    """What all ranks agreed on.

    Attributes:
        model: an id that is free on every rank.
        order: rank 0's order, as indices into this rank's list.
        alone: no rank has another model.
    """

    model: int
    order: list[int]
    alone: bool


def gather(host: EngineHost, value: Any) -> list[Any]:
    """Every rank's ``value``, by rank.

    Raises:
        HorovodInternalError: a rank is gone or does not come.
    """
    with common_step(host, "what ranks tell each other"):
        return group_collectives.gather_objects(value, host.registration_group)


@contextlib.contextmanager
def common_step(host: EngineHost, what: str) -> Iterator[None]:
    """Around a transfer that all ranks of an engine take part in, after the same steps.

    Args:
        what: it is, for an error.

    Raises:
        HorovodInternalError: it failed; names the rank that is gone, stopped or late.
    """
    kind = f"engine {host.process_set}"
    try:
        with request_errors.common_step(host.context, what, kind=kind, ranks=host.ranks):
            try:
                yield
            except RuntimeError:
                host.engine.check()  # knows better which rank is to blame, if it has noticed
                raise
    except HorovodInternalError as error:
        # Tells the others, which would take this rank's end for the cause.
        host.engine.fail(str(error), lost=isinstance(error, PeerLost))
        raise


def agree(host: EngineHost, mine: Sequence[tuple[str, tuple[int, ...], str]]) -> Agreed:
    """Checks that all ranks have the same parameters, and takes rank 0's order.

    Args:
        host: the engine.
        mine: (name, shape, dtype) of each parameter.

    Raises:
        ModelMismatch: on every rank, naming the first parameter that differs and where.
    """
    everyone = gather(host, (list(mine), host.models))
    check_same([parameters for parameters, _ in everyone], host.ranks)
    place = {name: i for i, (name, _, _) in enumerate(mine)}
    taken = set().union(*(models for _, models in everyone))
    order = [place[name] for name, _, _ in everyone[0][0]]
    return Agreed(host.free_id(taken), order, alone=not taken)


def union(host: EngineHost, indices: Iterable[int]) -> list[int]:
    """All indices that any rank has, in order."""
    return sorted(set().union(*gather(host, set(indices))))


def average_loss(host: EngineHost, loss: Any, absent: bool = False) -> Any:
    """The mean of the ranks' losses, in the type that was given; None stays None.

    An optimizer that looks at the loss must decide the same on every rank.

    Args:
        absent: this rank has joined and has no loss.
    """
    if absent:
        gather(host, None)
    if loss is None:
        return None
    values = [value for value in gather(host, float(loss)) if value is not None]
    mean = sum(values) / len(values)
    return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean
