"""Objects that ranks exchange once, when a model is registered. All functions are collective."""

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
    """The agreement of all ranks.

    Attributes:
        model: an id that is free on every rank.
        order: rank 0's order, as indices into this rank's list.
        alone: whether no rank has another model.
    """

    model: int
    order: list[int]
    alone: bool


def gather(host: EngineHost, value: Any) -> list[Any]:
    """Returns every rank's ``value``, by rank.

    Raises:
        HorovodInternalError: a rank is gone or does not take part.
    """
    with common_step(host, "what ranks tell each other"):
        return group_collectives.gather_objects(value, host.registration_group)


@contextlib.contextmanager
def common_step(host: EngineHost, what: str) -> Iterator[None]:
    """Wraps a transfer that all ranks of an engine take part in, after the same steps.

    Args:
        host: the engine.
        what: description of the transfer, for errors.

    Raises:
        HorovodInternalError: the transfer failed; names the rank that is gone, stopped or late.
    """
    kind = f"engine {host.process_set}"
    try:
        with request_errors.common_step(host.job, what, kind=kind, ranks=host.ranks):
            try:
                yield
            except RuntimeError:
                host.engine.check()  # the engine may have noticed which rank is to blame
                raise
    except HorovodInternalError as error:
        # Otherwise the other ranks would take this rank's end for the cause.
        host.engine.fail(str(error), lost=isinstance(error, PeerLost))
        raise


def agree(host: EngineHost, mine: Sequence[tuple[str, tuple[int, ...], str]]) -> Agreed:
    """Checks that all ranks have the same parameters, and adopts rank 0's order.

    Args:
        host: the engine.
        mine: (name, shape, dtype) of each parameter.

    Raises:
        ModelMismatch: on every rank; names the first parameter that differs and the ranks.
    """
    everyone = gather(host, (list(mine), host.models))
    check_same([parameters for parameters, _ in everyone], host.ranks)
    place = {name: i for i, (name, _, _) in enumerate(mine)}
    taken = set().union(*(models for _, models in everyone))
    if taken:
        _share(host)
    order = [place[name] for name, _, _ in everyone[0][0]]
    return Agreed(host.free_id(taken), order, alone=not taken)


def _share(host: EngineHost) -> None:
    """Prepares the engine for a second model, which a planned order does not cover."""
    host.shared = True
    if host.agreement == "planned" and host.first_agreement != "planned":
        issued: list[int | None] = gather(host, host.engine.hold_plan())
        host.end_plan(max(each or 0 for each in issued))


def union(host: EngineHost, indices: Iterable[int]) -> list[int]:
    """Returns all indices that any rank has, sorted."""
    return sorted(set().union(*gather(host, set(indices))))


def average_loss(host: EngineHost, loss: Any, absent: bool = False) -> Any:
    """Returns the mean of the ranks' losses, in the type of ``loss``; None stays None.

    An optimizer that uses the loss must decide the same on every rank.

    Args:
        host: the engine.
        loss: this rank's loss.
        absent: this rank has joined and has no loss.
    """
    if absent:
        gather(host, None)
    if loss is None:
        return None
    values = [value for value in gather(host, float(loss)) if value is not None]
    mean = sum(values) / len(values)
    return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean
