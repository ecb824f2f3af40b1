"""What a campaign has found, in a few lines: counts, times to end, violations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

__all__ = ["in_words"]


def in_words(records: Sequence[dict[str, Any]], wall_s: float | None = None) -> str:
    """The summary of these runs."""
    struck = [
        (record["job"], fault["fault"])
        for record in records
        for fault in record["faults"]
        if fault["struck_after_s"] is not None
    ]
    pace = f", {3600 * len(struck) / wall_s:.0f} faults an hour" if wall_s else ""
    lines = [f"{len(records)} runs, {len(struck)} faults{pace}", "", *_table(Counter(struck)), ""]
    for outcome in ("ended", "went on", "hang"):
        times = sorted(r["end_after_s"] for r in records if r["outcome"] == outcome)
        if times:
            lines.append(
                f"{outcome}: {len(times)} runs; from the last fault to the end {_spread(times)}"
            )
    named = Counter(r["culprit_named"] for r in records)
    lines.append(f"culprits named: {named[True]} of {named[True] + named[False]}")
    kinds = Counter(
        text.partition(":")[0] for record in records for text in record["violations"][:1]
    )
    lines.append(f"runs with violations: {sum(kinds.values())}")
    lines += [f"    {count} x {kind}" for kind, count in kinds.most_common()]
    return "\n".join(lines)


def _table(counts: Counter[tuple[str, str]]) -> list[str]:
    jobs = sorted({job for job, _ in counts})
    faults = sorted({fault for _, fault in counts})
    widths = [max(len(job), 5) for job in jobs]
    head = " ".join(f"{job:>{width}}" for job, width in zip(jobs, widths, strict=True))
    rows = [f"{'fault':<15}{head}"]
    for fault in faults:
        cells = " ".join(
            f"{counts[job, fault] or '':>{width}}" for job, width in zip(jobs, widths, strict=True)
        )
        rows.append(f"{fault:<15}{cells}")
    return rows


def _spread(times: Sequence[float]) -> str:
    def at(share: float) -> float:
        return times[min(len(times) - 1, int(share * len(times)))]

    return f"median {at(0.5):.1f} s, 90 % {at(0.9):.1f} s, max {times[-1]:.1f} s"
