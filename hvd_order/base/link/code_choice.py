"""Which gradients have to travel in fewer bits so that the link no longer makes a step longer.

A step lasts no less than its computation. Nor, for any set of gradients, less than the time on the
link of all of them and the least work from the first use of one to its gradient: that use waits for
the link, and the work follows. In a chain of layers the sets that matter are those with at least a
certain work, and the longest of these bounds is attained by due-date order (docs/theory.md). A
gradient outside of the set that gives the longest bound changes nothing, however few bits it has.
ESPRESSO and HiPress choose for each tensor, too, with the end of the backward pass as the only
deadline.

Source:
    Wang et al., "ESPRESSO", EuroSys 2023; Bai et al., "HiPress", SOSP 2021.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

__all__ = ["TimedGradient", "choose_coded", "choose_to_spare", "step_bound_s"]

_LINK_SHARE = 0.8
_WORTH = 1.005  # a bound that is longer than computation by less is not


@dataclass(frozen=True)
class TimedGradient:
    """One gradient, as the choice sees it.

    Attributes:
        work_s: computation from the first use of its parameter to the gradient.
        wire_s: time of its sum on the link.
        coded_s: the same in fewer bits; None: it must travel exactly.
        error: what the codes lack, relative to the gradient; positive.
    """

    work_s: float
    wire_s: float
    coded_s: float | None
    error: float = 1.0

    @property
    def saved_s(self) -> float:
        """What fewer bits save on the link."""
        return 0.0 if self.coded_s is None else self.wire_s - self.coded_s

    def on_link_at(self, share: float) -> TimedGradient:
        """The same on a link that reaches so much of its rate."""
        coded_s = None if self.coded_s is None else self.coded_s / share
        return replace(self, wire_s=self.wire_s / share, coded_s=coded_s)


def step_bound_s(
    compute_s: float, gradients: Sequence[TimedGradient], coded: Collection[int] = ()
) -> float:
    """The least time of a step whose gradients `coded`, by place, travel in fewer bits."""
    return max(compute_s, _longest(gradients, _by_work(gradients), coded)[0])


def choose_coded(compute_s: float, gradients: Sequence[TimedGradient]) -> list[int]:
    """The gradients that should travel in fewer bits, by place, with as little error as possible.

    Takes the one with the most time saved for its error out of the set that gives the longest
    bound, until the link is no longer the limit or nothing is left to take. Then leaves out again
    what the bound does not need, the largest error first.

    Args:
        compute_s: computation of a step.
    """
    coded: set[int] = set()
    order = _by_work(gradients)
    while True:
        bound_s, least_work_s = _longest(gradients, order, coded)
        if bound_s <= _WORTH * compute_s:
            break
        left = [
            place
            for place, each in enumerate(gradients)
            if place not in coded and each.saved_s > 0 and each.work_s >= least_work_s
        ]
        if not left:
            break
        coded.add(max(left, key=lambda p: (gradients[p].saved_s / gradients[p].error, -p)))
    limit_s = max(_WORTH * compute_s, bound_s)
    for place in sorted(coded, key=lambda p: (-gradients[p].error, gradients[p].saved_s)):
        coded.remove(place)
        if _longest(gradients, order, coded)[0] > limit_s:
            coded.add(place)
    return sorted(coded)


def choose_to_spare(compute_s: float, gradients: Sequence[TimedGradient]) -> list[int]:
    """The gradients to send in fewer bits in a real job: where the link is the limit, so many that
    it would keep pace even at part of its rate, which is what slices reach that must be in time.
    """
    if not choose_coded(compute_s, gradients):
        return []
    return choose_coded(compute_s, [each.on_link_at(_LINK_SHARE) for each in gradients])


def _by_work(gradients: Sequence[TimedGradient]) -> list[int]:
    return sorted(range(len(gradients)), key=lambda place: -gradients[place].work_s)


def _longest(
    gradients: Sequence[TimedGradient], order: Sequence[int], coded: Collection[int]
) -> tuple[float, float]:
    """The longest bound of any set, and the least work in that set.

    Args:
        order: of the gradients, from `_by_work`.
    """
    wire_s, longest = 0.0, (0.0, 0.0)
    for place in order:
        each = gradients[place]
        wire_s += each.wire_s - (each.saved_s if place in coded else 0.0)
        longest = max(longest, (wire_s + each.work_s, each.work_s))
    return longest
