"""What follows from the steps of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

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


def verdicts(summaries: Sequence[Mapping[str, Any]], link_gbit: float, size: int) -> list[str]:
    """A line of the link, and one of each model that hvd_order trained beside another system."""
    lines = [f"{size} ranks; an all-reduce leaves each at {link_gbit:.2f} Gbit/s"]
    for summary in summaries:
        if against := summary.get("against"):
            ratio = against["ratio"]
            lines.append(
                f"{summary['model']}: hvd_order takes {ratio['median']:.3f} "
                f"[{ratio['low']:.3f}, {ratio['high']:.3f}] of {against['system']}'s step: "
                f"{against['verdict']}"
            )
    return lines
