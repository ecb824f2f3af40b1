"""Which rank holds up the others, why, and for how long it has done so.

A delay is told when it lasts, and not for every step: a rank is slow if the median of `WINDOW`
steps costs the others a tenth of a step, and it is well again once that is less than a twentieth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

__all__: list[str] = []

WINDOW = 20  # steps
_SLOW = 0.10  # of the step
_WELL = 0.05
_SLOW_LINK = 0.6  # of the rate between the other hosts
_SENDER = 0.55  # weight of what a host sends; the rest is that of what it receives
_ON_CORES = 0.5  # of the delay, that threads have waited for a core


@dataclass(frozen=True)
class RankRow:
    """What one rank has seen in some steps.

    Attributes:
        step_s: by step.
        latest, latest_s, saved_s: by step, the rank (place) that it waited for most, how long, and
            by how much the step would be shorter without this delay (`replay.saved_ns`).
        parts_s: medians by name, in the order of a step: "backward pass", "host", "update",
            "loader", "forward pass".
        link_s: median of queue and transfer.
        run_queue_s: by step, that the training thread waited for a core.
        clock_error_s: largest error of times of this rank.
        late_slice: the first late slice of this rank, see `late_layer`; -1: none.
        sends_to, sends_per_s: the host (by number) to which it sends slowest, of those that get
            many of its bytes, and bytes per second while it does; -1: not known.
    """

    step_s: Sequence[float]
    latest: Sequence[int]
    latest_s: Sequence[float]
    saved_s: Sequence[float]
    parts_s: Mapping[str, float]
    link_s: float
    run_queue_s: float
    clock_error_s: float = 0.0
    late_slice: int = -1
    sends_to: int = -1
    sends_per_s: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Who holds up the others.

    Attributes:
        place: the rank; -1: none. For a link, a rank behind it.
        cause: see `StepStats.slow_cause`.
        late_slice: the first late slice; -1: none stands out.
        host: number of the host of a slow link; -1: the cause is no link.
        of_usual: of a slow link, its rate over that of the others.
        delay_s: what it costs each step.
        step_s: median of all ranks' steps.
    """

    place: int = -1
    cause: str = ""
    late_slice: int = -1
    host: int = -1
    delay_s: float = 0.0
    step_s: float = 0.0
    of_usual: float = 1.0

    @property
    def share(self) -> float:
        """Of the step."""
        return self.delay_s / self.step_s if self.step_s > 0 else 0.0


def verdict(rows: Sequence[RankRow], hosts: Sequence[int]) -> Verdict:
    """Names the rank or link that costs most.

    Args:
        rows: by place, of the same steps.
        hosts: number of each rank's host.
    """
    steps = len(rows[0].step_s)
    step_s = median(row.step_s[k] for row in rows for k in range(steps))
    late = _latest(rows, steps, step_s)
    link = _slowest_link(rows, hosts, step_s)
    return max(late, link, key=lambda each: each.delay_s)


def _latest(rows: Sequence[RankRow], steps: int, step_s: float) -> Verdict:
    # What the clocks cannot tell apart is no delay.
    found = Verdict(step_s=step_s, delay_s=max(row.clock_error_s for row in rows))
    for place in {place for row in rows for place in row.latest if place >= 0}:
        others = [row for i, row in enumerate(rows) if i != place]

        def mean_of(
            values: str, k: int, place: int = place, others: list[RankRow] = others
        ) -> float:
            of = [getattr(row, values)[k] for row in others if row.latest[k] == place]
            return float(sum(of)) / len(others)

        blamed_s = median_low(mean_of("latest_s", k) for k in range(steps))
        if blamed_s > found.delay_s:
            # Where another rank is nearly as late, or transfers pass meanwhile, less is gained.
            delay_s = median_low(mean_of("saved_s", k) for k in range(steps))
            if delay_s > found.delay_s:
                cause = _cause(rows[place], others)
                in_passes = cause.endswith("pass")
                late_slice = rows[place].late_slice if in_passes else -1
                found = Verdict(place, cause, late_slice, -1, delay_s, step_s)
    return found if found.place >= 0 else Verdict(step_s=step_s)


def _cause(row: RankRow, others: Sequence[RankRow]) -> str:
    more_s = {
        name: value - median(other.parts_s[name] for other in others)
        for name, value in row.parts_s.items()
    }
    name = max(more_s, key=more_s.__getitem__)
    queued_s = row.run_queue_s - median(other.run_queue_s for other in others)
    if queued_s >= _ON_CORES * max(more_s[name], 0.0) > 0:
        return "cores"
    return name


def _slowest_link(rows: Sequence[RankRow], hosts: Sequence[int], step_s: float) -> Verdict:
    """The host whose links in and out are slower than those between the other hosts."""
    rates: dict[tuple[int, int], float] = {}
    for row, host in zip(rows, hosts, strict=True):
        if row.sends_to >= 0 and row.sends_per_s > 0:
            edge = host, row.sends_to
            rates[edge] = max(rates.get(edge, 0.0), row.sends_per_s)
    slowest, part = -1, _SLOW_LINK
    for host in {host for edge in rates for host in edge}:
        others = [per_s for edge, per_s in rates.items() if host not in edge]
        if others:
            out = [per_s for (sender, _), per_s in rates.items() if sender == host]
            into = [per_s for (_, receiver), per_s in rates.items() if receiver == host]
            of_usual = [per_s / median(others) for per_s in (*out, *into)]
            # Where one of two hosts may be meant, it is the sender.
            weights = [*(_SENDER for _ in out), *(1 - _SENDER for _ in into)]
            mean = _geometric_mean(of_usual, weights)
            if min(of_usual) <= _SLOW_LINK and mean < part:
                slowest, part = host, mean
    if slowest < 0:
        return Verdict(step_s=step_s)
    link_s = median(row.link_s for row in rows)
    delay_s = link_s * (1 - part)  # at most
    return Verdict(hosts.index(slowest), "link", -1, slowest, delay_s, step_s, part)


def _geometric_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(w * math.log(v) for v, w in zip(values, weights, strict=True))
    return math.exp(total / sum(weights))


class SlowRank:
    """The rank that is slow at present: begins and ends once, however the verdicts vary."""

    def __init__(self) -> None:
        """Starts with none."""
        self.present: Verdict | None = None
        self._rows: list[Sequence[RankRow]] = []

    def seen(self, rows: Sequence[RankRow], hosts: Sequence[int]) -> list[tuple[Verdict, bool]]:
        """Takes the rows of further steps.

        Returns:
            What has ended or begun with these steps, and whether it has begun.
        """
        self._rows.append(rows)
        while len(self._rows) > 1 and _steps(self._rows[1:]) >= WINDOW:
            self._rows.pop(0)
        if _steps(self._rows) < WINDOW:
            return []
        now = verdict([_joined(of_rank) for of_rank in zip(*self._rows, strict=True)], hosts)
        before, news = self.present, []
        if before is not None:
            same = now.place == before.place and (now.host >= 0) == (before.host >= 0)
            self.present = now if same and now.share >= _WELL else None
            if self.present is None:
                news.append((before, False))
        if self.present is None and now.place >= 0 and now.share >= _SLOW:
            self.present = now
            news.append((now, True))
        return news


def _steps(rows: Sequence[Sequence[RankRow]]) -> int:
    return sum(len(each[0].step_s) for each in rows)


def _joined(rows: Sequence[RankRow]) -> RankRow:
    newest = rows[-1]
    return RankRow(
        step_s=[s for row in rows for s in row.step_s],
        latest=[r for row in rows for r in row.latest],
        latest_s=[s for row in rows for s in row.latest_s],
        saved_s=[s for row in rows for s in row.saved_s],
        parts_s={name: median(row.parts_s[name] for row in rows) for name in newest.parts_s},
        link_s=median(row.link_s for row in rows),
        run_queue_s=sum(row.run_queue_s for row in rows) / len(rows),
        clock_error_s=max(row.clock_error_s for row in rows),
        late_slice=newest.late_slice,
        sends_to=newest.sends_to,
        sends_per_s=median(row.sends_per_s for row in rows if row.sends_to == newest.sends_to),
    )
