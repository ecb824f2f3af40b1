"""Advice: the gain from ordering and the recommended mode. Pure: numbers in, words out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvd_order.base.link.link_model import LinkModel

__all__ = ["Advice", "Mode", "Outlook", "advise", "run_line"]

Mode = Literal["split", "order", "arrival", "none"]

_WORTH = 1.02  # gains below are noise on real machines; the tuner's measure as well
_FASTER = 10.0  # speed ratio of the other networks in a run's line
_FEWER = 3.9  # times fewer bytes of float32 gradients in codes of 8 bits


@dataclass(frozen=True)
class Outlook:
    """Step times of one model on one network, in seconds.

    Attributes:
        ranks: number of workers.
        compute_s: computation of a worker in a step.
        wire_s: time of the link for all gradients, bytes alone.
        today_s: DistributedDataParallel: large buckets in order of arrival, all awaited.
        arrival_s: large slices in order of arrival, overlapping with the next forward pass.
        order_s: slices in consumption order, overlapping with the next forward pass.
        bound_s: lower bound for any order.
        split_s: slices in two halves, in consumption order, overlapping with the next forward pass.
            None: the program does not clip gradients by their global norm. If it does, the other
            ways have to await all gradients, and overlap with the backward pass only.
        coded_s: as hvd_order's defaults send, with the gradients in 8 bits for which the link makes
            the step longer. None: there are none, or the step is not clearly shorter with them.
    """

    ranks: int
    compute_s: float
    wire_s: float
    today_s: float
    arrival_s: float
    order_s: float
    bound_s: float
    split_s: float | None = None
    coded_s: float | None = None

    @property
    def gain(self) -> float:
        """Speedup of training with order over today: 0.25 means a quarter more steps.

        In halves if gradients are clipped.
        """
        ordered_s = self.order_s if self.split_s is None else self.split_s
        return self.today_s / ordered_s - 1 if ordered_s else 0.0

    @property
    def possible_gain(self) -> float:
        """Speedup over today at the bound."""
        return self.today_s / self.bound_s - 1 if self.bound_s else 0.0


@dataclass(frozen=True)
class Advice:
    """The recommended mode and its reason.

    Attributes:
        mode: "split": consumption order in two halves, overlapping with the next step although
            gradients are clipped; "order": consumption order, "arrival": large slices in order of
            arrival, both overlapping with the next step unless gradients are clipped; "none": no
            change.
    """

    mode: Mode
    reason: str


def advise(outlook: Outlook) -> Advice:
    """Recommends the mode that is clearly faster, or the simpler mode if neither is."""
    if outlook.ranks == 1:
        return Advice("none", "with one worker nothing travels")
    if outlook.wire_s == 0:
        return Advice("none", "no parameter has a gradient, so nothing travels")
    if outlook.possible_gain < _WORTH - 1:
        return Advice("none", _why_nothing(outlook))
    whole_s = min(outlook.arrival_s, outlook.order_s)
    best_s = whole_s if outlook.split_s is None else min(whole_s, outlook.split_s)
    if outlook.today_s < _WORTH * best_s:
        return Advice(
            "none",
            f"{_percent(outlook.possible_gain)} would be possible with transfers that cost nothing "
            "but their bytes; what slices cost on this network takes it up",
        )
    if outlook.split_s is not None:
        return _advise_clipped(outlook, outlook.split_s, whole_s)
    if outlook.order_s > _WORTH * outlook.arrival_s:
        return Advice(
            "arrival",
            f"overlap with the next forward pass gains {_percent(outlook.today_s / best_s - 1)}; "
            "small slices cost more here than their order gains",
        )
    return Advice(
        "order",
        f"{_percent(outlook.gain)} faster than today, of {_percent(outlook.possible_gain)} that "
        "are possible",
    )


def _advise_clipped(outlook: Outlook, split_s: float, whole_s: float) -> Advice:
    """One of the modes, given that the best of them is clearly faster than today."""
    if split_s <= _WORTH * whole_s:
        slower = whole_s / split_s - 1
        whole = f"are {_percent(slower)} slower" if slower >= _WORTH - 1 else "are as fast"
        return Advice(
            "split",
            f"{_percent(outlook.gain)} faster than today, of {_percent(outlook.possible_gain)} "
            "that are possible; whole sums, which have to arrive before the norm is known, "
            f"{whole}",
        )
    return Advice(
        "order" if outlook.order_s * _WORTH < outlook.arrival_s else "arrival",
        f"gains {_percent(outlook.today_s / whole_s - 1)}; twice as many slices cost more here "
        "than their overlap with the next forward pass gains",
    )


def run_line(link: LinkModel, size_bytes: int, ranks: int, step_s: float | None) -> str:
    """One line of advice at the start of a run, which has no profile.

    A step is no shorter than its transfers or its computation, and no longer than their sum. So in
    a step of m seconds whose transfers take w, computation takes at least m - w. This is enough for
    bounds, not for a prediction.

    Args:
        link: link model measured among the ranks.
        size_bytes: total size of all gradients.
        step_s: median step time of the current run; None if unknown.
    """
    if ranks == 1:
        return "one worker: nothing travels, so there is nothing to order"
    wire_s = size_bytes * link.seconds_per_byte
    sent = (
        f"{size_bytes / 1e6:.3g} MB of gradients need {_seconds(wire_s)} of the network in each "
        f"step ({ranks} ranks)"
    )
    more = "hvd-order profile and hvd-order advise say more"
    if step_s is None:
        return f"{sent}, and no step can be shorter; {more}"
    least_compute_s = max(step_s - wire_s, 0.0)
    bound_s = max(wire_s, least_compute_s)
    if wire_s < (_WORTH - 1) * step_s:
        verdict = "transfers are too short for any order to gain anything"
    elif step_s <= _WORTH * wire_s:
        verdict = (
            "the network is the limit: no order can gain more, fewer bytes can "
            f"(compression=hvd.Compression.auto: {_seconds(max(wire_s / _FEWER, least_compute_s))} "
            "at least)"
        )
    else:
        verdict = (
            f"without any overlap it would take {_seconds(step_s + wire_s)} at most, with the best "
            f"order {_seconds(bound_s)} at least"
        )
    others = " and ".join(
        f"{_seconds(max(wire_s / factor, least_compute_s))} if the network were {_FASTER:g} times "
        f"{word}"
        for factor, word in ((_FASTER, "faster"), (1 / _FASTER, "slower"))
    )
    return f"a step takes {_seconds(step_s)}; {sent}: {verdict} (at least {others}); {more}"


def _why_nothing(outlook: Outlook) -> str:
    if outlook.wire_s >= outlook.bound_s / _WORTH:
        return (
            f"the network is the limit: gradients alone need {_seconds(outlook.wire_s)}, and no "
            "order makes them fewer; compression=hvd.Compression.auto or a faster network would"
        )
    return (
        f"communication is hidden already: a step takes {_seconds(outlook.today_s)}, and its "
        f"computation {_seconds(outlook.compute_s)}"
    )


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part < 10 else f"{part + 1:.0f} times"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
