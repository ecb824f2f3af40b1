"""Report on a model on a network."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_order.base.link.advice import Advice, advise
from hvd_order.planning.predict.simulated_step import Idle, SimulatedStep, Wait
from hvd_order.planning.predict.what_if import WhatIf
from hvd_order.planning.report.page import (
    CODED_COLUMN,
    ReportContent,
    Section,
    counted,
    ms_text,
    table_lines,
)

__all__ = ["advice_text", "report_of"]

_MOST = 6  # lines of a list; the rest is added up
_MODES = {
    "order": "order, overlapping with the next step (hvd_order's defaults)",
    "arrival": "large slices as they come, overlapping with the next step "
    "(HVD_ORDER_POLICY=arrival HVD_ORDER_SLICE_BYTES=25MiB)",
    "none": "none: stay with what you have",
}
_CLIPPED_MODES = {
    "split": "sums in halves, the second of which overlaps with the next step (hvd_order's "
    "defaults)",
    "order": "order, whole sums, awaited before the norm (HVD_ORDER_SPLIT=never)",
    "arrival": "large slices as they come, whole sums, awaited before the norm "
    "(HVD_ORDER_SPLIT=never HVD_ORDER_POLICY=arrival HVD_ORDER_SLICE_BYTES=25MiB)",
    "none": _MODES["none"],
}
_CLIPPED = "; gradients are clipped by their global norm"
_COLUMNS = (
    "as today: DDP, all gradients awaited; the other two overlap with the next step. "
    "gain: in order against today"
)
_CLIPPED_COLUMNS = (
    "as today: DDP; in the first three columns of steps all gradients are awaited before the norm "
    "is known. in halves: the second half of each sum overlaps with the next step. "
    "gain: in halves against today"
)

_LOSES = (
    "Where gain is below zero a job does not lose it: its trials (HVD_ORDER_TUNE=1, the default) "
    "take DDP's way there."
)


def report_of(model: str, what_if: WhatIf, steps: Sequence[SimulatedStep]) -> ReportContent:
    """Sums up simulated steps of one model on one network."""
    bound_s = what_if.bound_s
    servers = "" if what_if.servers is None else f", {counted(what_if.servers, 'parameter server')}"
    rows = [
        ["", "step", "x bound", "E", "S", "of possible", "computes", "waits", "link busy", "idle"]
    ]
    for name, step in zip(what_if.ways, steps, strict=True):
        overlap = step.overlap
        bounded = name != "coded"  # the bound is that of all bytes
        rows.append(
            [
                step.title,
                ms_text(step.step_s),
                _number(step.step_s / bound_s if bounded else None),
                _number(overlap.efficiency),
                _number(overlap.speedup),
                _number(overlap.part_of_possible(bound_s) if bounded else None),
                ms_text(step.compute_s),
                ms_text(step.wait_s),
                ms_text(step.step_s - step.idle_s),
                ms_text(step.idle_s),
            ]
        )
    rows.append(["bound: no order does better", ms_text(bound_s), "1.000", *[""] * 7])
    facts = [
        f"{what_if.network}{servers}{_CLIPPED * what_if.clipped}.",
        f"Gradients of {what_if.size_bytes / 1e6:.4g} MB keep the link busy for "
        f"{ms_text(what_if.wire_s)}, slices' costs aside; computation takes "
        f"{ms_text(what_if.graph.compute_s)}.",
    ]
    if what_if.servers is None:  # a mode of hvd_order is recommended, and it has no servers yet
        facts.append(_advice_fact(advise(what_if.outlook()), what_if.clipped))
        facts += _codes_facts(what_if)
    sections = []
    for step in steps:
        sections.append(Section(f"{step.title}: when the link is idle", _idle_lines(step.idle)))
        sections.append(Section(f"{step.title}: what blocks what", _wait_lines(step.waits)))
    return ReportContent(f"{model}: what transfers cost", facts, rows, sections)


def advice_text(model: str, networks: Sequence[WhatIf], here: int | None) -> str:
    """A table over networks, and the recommendation.

    Args:
        networks: the same model on each.
        here: place of the requested network; None if there is none.
    """
    first = networks[0]
    halves, coded = ["in halves"] * first.clipped, ["with 8 bits"] * first.encodes
    rows = [["link", "gradients", "as today", "as they come", "in order", *halves, "bound", "gain",
             "possible", "mode", *coded]]  # fmt: skip
    advices = []
    for i, what_if in enumerate(networks):
        outlook = what_if.outlook()
        advices.append(advise(outlook))
        rows.append(
            [
                ("> " if i == here else "") + what_if.network.rate_text,
                *map(ms_text, (outlook.wire_s, outlook.today_s, outlook.arrival_s, outlook.order_s,
                           *([] if outlook.split_s is None else [outlook.split_s]),
                           outlook.bound_s)),
                f"{100 * outlook.gain:.0f} %",
                f"{100 * outlook.possible_gain:.0f} %",
                advices[-1].mode,
                *(["-" if outlook.coded_s is None else ms_text(outlook.coded_s)] * first.encodes),
            ]
        )  # fmt: skip
    lines = [
        f"{model}: computation {ms_text(first.graph.compute_s)}, gradients of "
        f"{first.size_bytes / 1e6:.4g} MB; "
        + (str(networks[here].network) if here is not None
           else f"{counted(first.network.ranks, 'worker')} on usual networks")
        + _CLIPPED * first.clipped,
        "",
        *table_lines(rows),
        "",
        _CLIPPED_COLUMNS if first.clipped else _COLUMNS,
        *([CODED_COLUMN] * first.encodes),
    ]  # fmt: skip
    if any(round(100 * what_if.outlook().gain) < 0 for what_if in networks):
        lines += [_LOSES]
    if here is not None:
        lines += ["", _advice_fact(advices[here], first.clipped), *_codes_facts(networks[here])]
    return "\n".join(lines) + "\n"


def _advice_fact(advice: Advice, clipped: bool) -> str:
    mode = (_CLIPPED_MODES if clipped else _MODES)[advice.mode]
    return f"Recommended: {mode}. {advice.reason[0].upper()}{advice.reason[1:]}."


def _codes_facts(what_if: WhatIf) -> list[str]:
    """What fewer bits gain; nothing where they gain nothing."""
    outlook = what_if.outlook()
    if outlook.coded_s is None:
        return []
    plain_s = min(outlook.today_s, outlook.arrival_s, outlook.order_s, outlook.split_s or math.inf)
    return [
        f"compression=hvd.Compression.auto would take {len(what_if.coded)} of "
        f"{counted(sum(map(bool, what_if.graph.producers)), 'gradient')} to 8 bits: "
        f"{ms_text(outlook.coded_s)} instead of {ms_text(plain_s)}."
    ]


def _idle_lines(idle: Sequence[Idle]) -> list[tuple[float, str]]:
    """By cause, the longest first."""
    by_cause: dict[str, list[Idle]] = {}
    for each in idle:
        by_cause.setdefault(each.cause, []).append(each)
    lines = []
    for cause, some in by_cause.items():
        longest = max(some, key=lambda each: each.length_s)
        times = f" ({len(some)} times)" if len(some) > 1 else ""
        until = f"; the longest, {ms_text(longest.length_s)}, until {longest.until}"
        lines.append(
            (sum(each.length_s for each in some), cause + times + until * bool(longest.until))
        )
    return sorted(lines, reverse=True)


def _wait_lines(waits: Sequence[Wait]) -> list[tuple[float, str]]:
    """The longest first; the rest as one."""
    longest = sorted(waits, key=lambda wait: -wait.length_s)
    lines = [(wait.length_s, _wait_text(wait)) for wait in longest[:_MOST]]
    rest = longest[_MOST:]
    if rest:
        lines.append((sum(wait.length_s for wait in rest), f"{counted(len(rest), 'more wait')}"))
    return lines


def _wait_text(wait: Wait) -> str:
    text = f"{wait.waiting} waits for {wait.awaited}"
    if not wait.behind:
        return f"{text}, which has the link for itself"
    first = ", ".join(f"{name} ({ms_text(seconds)})" for name, seconds in wait.behind[:3])
    more = len(wait.behind) - 3
    return f"{text}, beside or behind {first}{f' and {more} more' * (more > 0)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
