"""Who is measured when: rivals take turns, so that all of them meet the same machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Rounds of one turn each: A B C, C B A, B C A, A C B, ...

    A machine that slowly speeds up or slows down favours nobody. The order depends on the round
    alone: all ranks take the same turns.
    """
    for number in range(rounds):
        shift = number // 2 % len(names)
        order = [*names[shift:], *names[:shift]]
        for name in order if number % 2 == 0 else reversed(order):
            yield number, name


def take_turns(
    measure: Mapping[str, Callable[[], float]], rounds: int, warm_up: int
) -> dict[str, list[float]]:
    """What each of ``measure`` returned, round by round; the first ``warm_up`` rounds not kept."""
    values: dict[str, list[float]] = {name: [] for name in measure}
    for number, name in turns(list(measure), warm_up + rounds):
        value = measure[name]()
        if number >= warm_up:
            values[name].append(value)
    return values
