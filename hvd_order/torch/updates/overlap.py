"""Reports which parameters' updates do not wait for their readers, and why."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvd_order.torch.parameters.entry import ParameterEntry

__all__ = ["NotDeferred", "OverlapReport"]

_log = logging.getLogger("hvd_order")
_LARGE = 0.25  # the line is a warning from this share of the bytes on

ALIASED = (
    "something beside the model reaches their memory (p.data in a variable, a numpy view, a view "
    "of a flat buffer); drop it before step()"
)
HELD = "C++ holds them (TorchScript, or a graph that is kept after backward())"
FOREIGN = (
    "their memory is not PyTorch's own (from_numpy, share_memory_, a mapped file); "
    "p.data = p.data.clone() before training makes it so"
)
STATE_HELD = "the program holds optimizer.state, or a part of it; drop it before step()"
UNSEEN = "nothing was seen to read them when it was watched, or C++ did outside of any module"
GRADIENT_KEPT = (
    "the program keeps their gradients, or tensors or arrays of the same memory (flat gradients), "
    "so the sums are there when backward() returns; drop them, or set .grad to None before "
    "backward()"
)
OTHER_THREAD = "another thread than the one that calls step() reads parameters"
SPARSE = "their gradients are sparse"
OWN_CLASS = "their class handles reads by itself (__torch_function__, __slots__)"

LEARNING = "the first two steps show in which order parameters are read"
SWITCHED_OFF = "HVD_ORDER_CROSS_ITERATION=0"
NO_GAIN = "trials on real steps found that it does not make them shorter"
GRADIENTS_READ = "elements of gradients were read before step()"
GRADIENTS_REPLACED = "the program has replaced gradients before step(), or set them to None"
CLOSURE = "the optimizer may evaluate the closure more than once"
SCALED = "GradScaler hands its scale to the optimizer (fused=True)"
ONE_RANK = "there is one rank: nothing travels"


def clipped(why_whole: str) -> str:
    """The reason text for gradients that were clipped or unscaled while all-reduces are whole."""
    return (
        "gradients were clipped or unscaled before step(), and all-reduces are not split: "
        + why_whole
    )


def no_maxima(why: str) -> str:
    """The reason text for infinity norms that are not known before all sums have arrived."""
    return f"an infinity norm of gradients was read before step(), but is not known early: {why}"


def called_inside(what: str) -> str:
    """The reason text for a ``step()`` inside of a context that affects operators."""
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
    """Deferred updates of the last ``step()``: their communication can overlap the next forward
    pass.

    Attributes:
        parameters, size_bytes: all that are trained.
        deferred_parameters, deferred_bytes: those whose update waits for their first reader.
        not_deferred: all other parameters, by reason.
    """

    parameters: int = 0
    size_bytes: int = 0
    deferred_parameters: int = 0
    deferred_bytes: int = 0
    not_deferred: Mapping[str, NotDeferred] = field(default_factory=dict)

    def __str__(self) -> str:
        """The report as one line."""
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
    """Records the updates of each step that were not deferred, and logs a summary."""

    def __init__(self, rank: int) -> None:
        """Starts without records.

        Args:
            rank: only rank 0 logs.
        """
        self._entries: Sequence[ParameterEntry] = ()  # of the last step, like the next
        self._reasons: Mapping[ParameterEntry, str] = {}
        self._rank = rank
        self._steps = 0
        self._told: frozenset[str] = frozenset()

    def note(
        self, entries: Sequence[ParameterEntry], reasons: Mapping[ParameterEntry, str], learnt: bool
    ) -> None:
        """Records one ``step()``.

        Args:
            entries: all entries of the model.
            reasons: by entry, for those that were updated at once.
            learnt: the steps in which nothing is deferred are over.
        """
        self._entries, self._reasons = list(entries), reasons
        # Of NO_GAIN the trials tell when they have chosen; until then it comes and goes.
        if learnt and NO_GAIN not in reasons.values():
            self._steps += 1
            if self._rank == 0 and self._steps > 1 and self._steps & (self._steps - 1) == 0:
                self._log_report()

    def _log_report(self) -> None:
        """Logs the report if it has something new."""
        report = self.report
        reasons = frozenset(report.not_deferred)
        if not reasons <= self._told:
            self._told |= reasons
            at_once_bytes = report.size_bytes - report.deferred_bytes
            is_much = at_once_bytes > _LARGE * report.size_bytes
            _log.log(logging.WARNING if is_much else logging.INFO, "%s", report)

    @property
    def report(self) -> OverlapReport:
        """The report of the last step."""
        by_reason: dict[str, list[ParameterEntry]] = {}
        for entry, reason in self._reasons.items():
            by_reason.setdefault(reason, []).append(entry)
        not_deferred = {
            reason: NotDeferred(tuple(s.name for s in group), sum(s.size_bytes for s in group))
            for reason, group in by_reason.items()
        }
        at_once_bytes = sum(group.size_bytes for group in not_deferred.values())
        total_bytes = sum(entry.size_bytes for entry in self._entries)
        return OverlapReport(
            len(self._entries), total_bytes, len(self._entries) - len(self._reasons),
            total_bytes - at_once_bytes, not_deferred,
        )  # fmt: skip
