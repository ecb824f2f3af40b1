"""A plan: the order and the slices of one model's gradients on one cluster.

``hvd-order tune`` writes it; a run with ``HVD_ORDER_PLAN`` follows it and adds its measurements.
docs/guides/planning.md describes the file. No framework needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from hvd_order.base.document import Fields, read_document, write_document
from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import AgreementName, SliceSettings
from hvd_order.base.plan.parameter import GraphParameter, check_parameters, parameter_from

__all__ = ["VERSION", "Confirmed", "Plan", "PlanCandidate", "read_plan"]

_KIND = "plan"
VERSION = 1
_LEAST_BYTES = 64  # SliceLayout::kCutAlignment
_LISTED = 3  # number of differences that a message names

_PolicyName = Literal["priority", "arrival"]


@dataclass(frozen=True)
class PlanCandidate:
    """Slice settings and the step time that the simulator predicts for them, in seconds."""

    slice_settings: SliceSettings
    predicted_s: float


@dataclass(frozen=True)
class Confirmed:
    """The choice of trials on real steps.

    Attributes:
        step_s: step time measured with the choice, on the slowest rank.
        ranks: number of ranks of the job that measured it.
        coded: the parameters whose gradients ``Compression.auto`` sends in fewer bits; None: the
            program did not leave that open.
    """

    slice_settings: SliceSettings
    step_s: float
    ranks: int
    coded: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """Order, slice settings and agreement for one model on one cluster.

    Attributes:
        model: descriptive name.
        ranks, link: the cluster that the plan was made for.
        order: name of the heuristic that ordered ``parameters``; informative only.
        parameters: parameters whose gradients travel, the most urgent first.
        idle: parameters without gradient in the profile.
        candidates: slice settings, the best first; the others are worth a trial. All have one
            agreement.
        bound_s: lower bound on the step time of any order.
        issue_order: for ``planned`` agreement, names of all slices of the first candidate in
            sending order.
        confirmed: None until trials have been made.

    Raises:
        InvalidUsage: a number or name is invalid.
    """

    model: str
    ranks: int
    link: LinkModel
    order: str
    parameters: tuple[GraphParameter, ...]
    candidates: tuple[PlanCandidate, ...]
    bound_s: float
    idle: tuple[GraphParameter, ...] = ()
    issue_order: tuple[str, ...] | None = None
    confirmed: Confirmed | None = None

    def __post_init__(self) -> None:
        if not self.candidates:
            raise InvalidUsage('"candidates" is empty; a plan has one at least')
        for number, candidate in enumerate(self.candidates):
            _check_settings(candidate.slice_settings, f"candidate {number}")
            _check_time(candidate.predicted_s, f'candidate {number} has "predicted_s"')
        _check_time(self.bound_s, 'the plan has "bound_s"', least=0.0)
        for name, number_s in asdict(self.link).items():
            _check_time(number_s, f'"cluster" has "{name}"', least=0.0)
        _check_ranks(self.ranks, '"cluster"')
        if self.confirmed is not None:
            _check_settings(self.confirmed.slice_settings, '"confirmed"')
            _check_time(self.confirmed.step_s, '"confirmed" has "step_s"')
            _check_ranks(self.confirmed.ranks, '"confirmed"')
        check_parameters((*self.parameters, *self.idle))
        known = {parameter.name for parameter in (*self.parameters, *self.idle)}
        coded = (self.confirmed and self.confirmed.coded) or ()
        if not known.issuperset(coded):
            unknown = next(name for name in coded if name not in known)
            raise InvalidUsage(f'"confirmed" has {unknown!r} in "coded"; the plan lacks it')
        listed = self.issue_order or ()
        if len(set(listed)) < len(listed):
            twice = next(name for name in listed if listed.count(name) > 1)
            raise InvalidUsage(f'"issue_order" has {twice!r} more than once')

    @property
    def agreement(self) -> AgreementName:
        """Order agreement of the candidates."""
        return self.candidates[0].slice_settings.agreement

    @property
    def slice_settings(self) -> SliceSettings:
        """Initial slice settings: the choice of trials, or else the best prediction."""
        return (
            self.candidates[0].slice_settings
            if self.confirmed is None
            else self.confirmed.slice_settings
        )

    def issue_order_of(self, settings: SliceSettings) -> tuple[str, ...] | None:
        """The plan's static order of slices for these settings, or None if the plan has none."""
        return self.issue_order if settings == self.candidates[0].slice_settings else None

    def in_order(self, names: Sequence[str]) -> list[str]:
        """Sorts all names of a model that the plan fits, the most urgent first."""
        place = {p.name: i for i, p in enumerate((*self.parameters, *self.idle))}
        return sorted(names, key=place.__getitem__)

    def differences(self, size_bytes: Mapping[str, int]) -> list[str]:
        """Reasons why the plan does not fit a model, one sentence each; empty if it fits.

        Args:
            size_bytes: sizes of the model's trainable parameters, by name.
        """
        planned = {p.name: p.size_bytes for p in self.parameters}
        known = {**{p.name: p.size_bytes for p in self.idle}, **planned}
        unknown = [name for name in size_bytes if name not in known]
        gone = [name for name in planned if name not in size_bytes]
        found = []
        if unknown:
            found.append(f"the plan lacks {_some(unknown)}")
        if gone:
            found.append(f"the model lacks {_some(gone)}, or does not train it")
        found += [
            f"'{name}' has {size} bytes, in the plan {known[name]}"
            for name, size in size_bytes.items()
            if known.get(name, size) != size
        ][:_LISTED]
        return found

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file; an existing file is replaced atomically."""
        write_document(path, _KIND, VERSION, self._document())

    def _document(self) -> dict[str, Any]:
        done = self.confirmed
        return {
            "model": self.model,
            "cluster": {"ranks": self.ranks, **asdict(self.link)},
            "bound_s": self.bound_s,
            "agreement": self.agreement,
            "candidates": [
                {
                    **_sizes(each.slice_settings),
                    **({"split": True} if each.slice_settings.split else {}),
                    "predicted_s": each.predicted_s,
                }
                for each in self.candidates
            ],
            "confirmed": done
            and {
                **_sizes(done.slice_settings),
                "agreement": done.slice_settings.agreement,
                "cross_iteration": done.slice_settings.cross_iteration,
                "small_front": done.slice_settings.small_front,
                "split": done.slice_settings.split,
                "step_s": done.step_s,
                "ranks": done.ranks,
                **({} if done.coded is None else {"coded": list(done.coded)}),
            },
            "order": self.order,
            "parameters": [asdict(parameter) for parameter in self.parameters],
            "idle": [asdict(parameter) for parameter in self.idle],
            "issue_order": self.issue_order and list(self.issue_order),
        }


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a file that :meth:`Plan.write` wrote.

    Raises:
        InvalidUsage: the file is no plan, has another version or an impossible content; the
            message names the file and the place in it.
        OSError: the file does not exist.
    """
    return read_document(path, _KIND, VERSION, _plan)


def _plan(top: Fields) -> Plan:
    model = top.take("model", str)
    cluster = Fields(top.take("cluster", dict), '"cluster"')
    ranks = cluster.take("ranks", int)
    link = LinkModel(
        *(cluster.take(k, float) for k in ("latency_s", "slice_cost_s", "seconds_per_byte"))
    )
    cluster.end()
    bound_s = top.take("bound_s", float)
    agreement = top.choice("agreement", get_args(AgreementName))
    candidates = [
        _candidate(each, i, agreement) for i, each in enumerate(top.take("candidates", list))
    ]
    confirmed = top.take("confirmed", dict, type(None))
    order = top.take("order", str)
    parameters, idle = (
        [parameter_from(each, f'{i} of "{key}"') for i, each in enumerate(top.take(key, list))]
        for key in ("parameters", "idle")
    )
    issue_order = top.names("issue_order", optional=True)
    return Plan(
        model,
        ranks,
        link,
        order,
        tuple(parameters),
        tuple(candidates),
        bound_s,
        tuple(idle),
        issue_order,
        None if confirmed is None else _confirmed(confirmed, agreement),
    )


def _candidate(content: Any, number: int, agreement: AgreementName) -> PlanCandidate:
    fields = Fields(content, f"candidate {number}")
    split = fields.flag("split", default=False)
    settings = replace(_settings(fields), agreement=agreement, split=split)
    candidate = PlanCandidate(settings, fields.take("predicted_s", float))
    fields.end()
    return candidate


def _confirmed(content: Any, planned: AgreementName) -> Confirmed:
    """Reads the choice of trials; files from before trials varied them lack the last ones."""
    before = {"agreement": planned, "cross_iteration": True, "small_front": True, "split": False}
    fields = Fields({**before, "coded": None, **content}, '"confirmed"')
    settings = replace(
        _settings(fields),
        agreement=fields.choice("agreement", get_args(AgreementName)),
        cross_iteration=fields.flag("cross_iteration"),
        small_front=fields.flag("small_front"),
        split=fields.flag("split"),
    )
    step_s, ranks = fields.take("step_s", float), fields.take("ranks", int)
    confirmed = Confirmed(settings, step_s, ranks, fields.names("coded", optional=True))
    fields.end()
    return confirmed


def _settings(fields: Fields) -> SliceSettings:
    return SliceSettings(
        fields.take("slice_bytes", int),
        fields.take("credit_bytes", int),
        fields.choice("policy", get_args(_PolicyName)),
    )


def _sizes(settings: SliceSettings) -> dict[str, Any]:
    """Reverses `_settings`."""
    return {
        "slice_bytes": settings.slice_bytes,
        "credit_bytes": settings.credit_bytes,
        "policy": settings.policy,
    }


def _check_settings(settings: SliceSettings, where: str) -> None:
    if not _LEAST_BYTES <= settings.slice_bytes <= settings.credit_bytes:
        raise InvalidUsage(
            f"{where} has slices of {settings.slice_bytes} bytes and a credit of "
            f"{settings.credit_bytes}; expected {_LEAST_BYTES} <= slice_bytes <= credit_bytes"
        )


def _check_time(seconds: float, what: str, least: float = math.ulp(0.0)) -> None:
    if not (math.isfinite(seconds) and seconds >= least):
        kind = "a time above 0" if least else "0 or more"
        raise InvalidUsage(f"{what}: {seconds}; expected {kind}")


def _check_ranks(ranks: int, where: str) -> None:
    if ranks < 1:
        raise InvalidUsage(f'{where} has "ranks": {ranks}; expected 1 or more')


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(f"'{name}'" for name in names[:_LISTED]) + more
