"""Says which parameters' updates do not wait for their readers, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hvd_order.torch.parameters.entry import ParameterEntry

__all__ = ["NotDeferred", "OverlapReport"]

_log = logging.getLogger("hvd_order")
_LARGE = 0.25  # share of the bytes from which on the line is a warning

ALIASED = (
    "something beside the model reaches their memory (p.data, a numpy view, a kept state_dict, a "
    "view of a flat buffer); drop it before step()"
)
HELD = "C++ holds them (TorchScript, or a graph that is kept after backward())"
FOREIGN = (
    "their memory is not PyTorch's own (from_numpy, share_memory_, a mapped file); "
    "p.data = p.data.clone() before training makes it so"
)
STATE_HELD = "the program holds optimizer.state, or a part of it; drop it before step()"
UNSEEN = "nothing was seen to read them when it was watched, or C++ did outside of any module"
SPARSE = "their gradients are sparse"
OWN_CLASS = "their class handles reads by itself (__torch_function__, __slots__)"

LEARNING = "the first two steps show in which order parameters are read"
SWITCHED_OFF = "HVD_ORDER_CROSS_ITERATION=0"
GRADIENTS_READ = "gradients were read before step() (clipping, unscaling, a norm)"
GRADIENTS_REPLACED = "the program has replaced gradients before step(), or set them to None"
CLOSURE = "the optimizer may evaluate the closure more than once"
SCALED = "GradScaler hands its scale to the optimizer (fused=True)"
ONE_RANK = "there is one rank: nothing travels"


def called_inside(what: str) -> str:
    """The reason of a ``step()`` that was called inside of something."""
    return f"step() was called inside of {what}"


@dataclass(frozen=True)
class NotDeferred:
    """Parameters that were updated in ``step()`` for one reason.

    Attributes:
        names: of the parameters.
        size_bytes: of all of them.
    """

    names: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True)
class OverlapReport:
    """What the last ``step()`` deferred: its communication can go on in the next forward pass.

    Attributes:
        parameters, size_bytes: all that are trained.
        deferred_parameters, deferred_bytes: those whose update waits for their first reader.
        not_deferred: the others, by reason.
    """

    parameters: int = 0
    size_bytes: int = 0
    deferred_parameters: int = 0
    deferred_bytes: int = 0
    not_deferred: Mapping[str, NotDeferred] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line."""
        if not self.not_deferred:
            return f"overlap with the next forward pass: all {self.parameters} parameters"
        groups = "; ".join(
            f"{len(each.names)} ({_size(each.size_bytes)}, {_first(each.names)}): {reason}"
            for reason, each in self.not_deferred.items()
        )
        return (
            f"overlap with the next forward pass: {self.deferred_parameters} of {self.parameters} "
            f"parameters, {_size(self.deferred_bytes)} of {_size(self.size_bytes)}. Not deferred: "
            f"{groups}"
        )


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count} bytes"


def _first(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}, ..."


class Overlap:
    """Notes of each step what was not deferred, and tells the user once it has become clear."""

    def __init__(self, rank: int) -> None:
        """Nothing is known.

        Args:
            rank: rank 0 tells.
        """
        self.report = OverlapReport()
        self._rank = rank
        self._steps = 0
        self._told: frozenset[str] = frozenset()

    def note(
        self, entries: Iterable[ParameterEntry], reasons: Mapping[ParameterEntry, str], learnt: bool
    ) -> None:
        """One ``step()``.

        Args:
            entries: all of the model.
            reasons: of those that were updated at once.
            learnt: the steps in which nothing is deferred are over.
        """
        entries = list(entries)
        by_reason: dict[str, list[ParameterEntry]] = {}
        for entry, reason in reasons.items():
            by_reason.setdefault(reason, []).append(entry)
        at_once_bytes = sum(entry.size_bytes for entry in reasons)
        total_bytes = sum(entry.size_bytes for entry in entries)
        self.report = OverlapReport(
            len(entries), total_bytes, len(entries) - len(reasons), total_bytes - at_once_bytes,
            {
                reason: NotDeferred(tuple(s.name for s in group), sum(s.size_bytes for s in group))
                for reason, group in by_reason.items()
            },
        )  # fmt: skip
        if learnt:
            self._steps += 1
            self._tell(at_once_bytes > _LARGE * total_bytes)

    def _tell(self, is_much: bool) -> None:
        """After 2, 4, 8, ... steps, where something new is to be said."""
        reasons = frozenset(self.report.not_deferred)
        is_turn = self._steps > 1 and self._steps & (self._steps - 1) == 0
        if is_turn and self._rank == 0 and not reasons <= self._told:
            self._told |= reasons
            _log.log(logging.WARNING if is_much else logging.INFO, "%s", self.report)
