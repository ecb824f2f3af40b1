"""The comparison as table and verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.runner.records.report import table
from benchmarks.runner.records.summary import paired_ratio

_RIVALS = ("ddp", "ddp_tuned", "fsdp2", "horovod")


def summarize(row: Mapping[str, Any]) -> dict[str, Any]:
    """Medians of one model's systems, and how hvd_order relates to the fastest of the others.

    Args:
        row: ``local``: steps without communication; ``systems``: of each, ``steps`` in seconds.
    """
    local_s = median(row["local"])
    systems = {}
    for name, measured in row["systems"].items():
        step_s = median(measured["steps"])
        systems[name] = {
            "step_s": step_s,
            "over_local": step_s / local_s,
            "exposed_s": max(0.0, step_s - local_s),
            "profiled_exposed_s": measured["profiled_exposed_s"],
            "note": measured["note"],
        }
    summary = {"model": row["model"], "local_s": local_s, "systems": systems}
    rivals = [name for name in _RIVALS if name in systems]
    if "hvd_order" in systems and rivals:
        best = min(rivals, key=lambda name: systems[name]["step_s"])
        ratio = paired_ratio(row["systems"]["hvd_order"]["steps"], row["systems"][best]["steps"])
        summary["against"] = {"system": best, "ratio": ratio.to_json(), "verdict": _verdict(ratio)}
    return summary


def _verdict(ratio: Any) -> str:
    if ratio.high < 1:
        return "faster"
    return "slower" if ratio.low > 1 else "not to be told apart"


def text(summaries: Sequence[Mapping[str, Any]], link_gbit: float, size: int) -> str:
    """Table and verdicts as Markdown."""
    header = [
        "model",
        "system",
        "step ms",
        "/ local",
        "not hidden ms",
        "by profiler ms",
        "settings",
    ]
    rows = [
        [
            summary["model"], name, f"{1e3 * one['step_s']:.1f}", f"{one['over_local']:.3f}",
            f"{1e3 * one['exposed_s']:.1f}", _milliseconds(one["profiled_exposed_s"]), one["note"],
        ]
        for summary in summaries
        for name, one in summary["systems"].items()
    ]  # fmt: skip
    place = header.index("by profiler ms")
    if not any(row[place] for row in rows):  # on CPUs
        for row in (header, *rows):
            del row[place]
    lines = [f"{size} ranks; an all-reduce leaves each at {link_gbit:.2f} Gbit/s", ""]
    lines += [table(header, rows), ""]
    for summary in summaries:
        if against := summary.get("against"):
            ratio = against["ratio"]
            lines.append(
                f"{summary['model']}: hvd_order takes {ratio['median']:.3f} "
                f"[{ratio['low']:.3f}, {ratio['high']:.3f}] of {against['system']}'s step: "
                f"{against['verdict']}"
            )
    return "\n".join(lines) + "\n"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"
