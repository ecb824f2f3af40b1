"""The list of actions: small functions of a `World`, each with its place in a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from random_programs.world import World

Run = Callable[[World, int], None]


class Place(Enum):
    """Where in a step an action may stand."""

    BETWEEN = "between"  # after step() and before the next backward pass: updates may be deferred
    ZERO = "zero"  # how gradients are cleared
    BACKWARD = "backward"  # forward and backward passes
    GRADIENTS = "gradients"  # after the backward pass, before step()
    UPDATE = "update"
    WHOLE = "whole"  # a step of its own way, closure and all


@dataclass(frozen=True)
class Action:
    """One action.

    Attributes:
        name: of its function.
        run: what it does; its number chooses a parameter, a factor or the like.
        first: it may also come before the optimizer is distributed.
        alone: one rank may do it while the other does not.
        numbers: how many numbers there are to choose from; 1 if it takes none.
        renews: parameters may have other gradients afterwards, or none, so whoever has kept the
            old ones has nothing to do with them any more.
    """

    name: str
    run: Run
    place: Place
    first: bool
    alone: bool
    numbers: int
    renews: bool


ACTIONS: dict[str, Action] = {}


def action(
    place: Place = Place.BETWEEN,
    *,
    first: bool = False,
    alone: bool = False,
    numbers: int = 1,
    renews: bool | None = None,
) -> Callable[[Run], Run]:
    """Puts a function on the list, under its own name."""

    def put(run: Run) -> Run:
        assert run.__name__ not in ACTIONS
        others = place is Place.WHOLE if renews is None else renews
        ACTIONS[run.__name__] = Action(run.__name__, run, place, first, alone, numbers, others)
        return run

    return put
