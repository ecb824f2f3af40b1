"""Tables of the page that show more than the targets, by benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.results_page.documents import Document
from benchmarks.results_page.measures import last_outcomes, queues_of
from benchmarks.runner.records.report import table
from benchmarks.runner.records.summary import paired_ratio


def _cells(runs: Sequence[Document]) -> list[str]:
    """Seconds a step of each cell, system by system."""
    rows = []
    for run in runs:
        for cell, summary in zip(run.raw["cells"], run.content["summary"]["cells"], strict=True):
            setting = cell["setting"]
            what, optimum = setting["model"], f"{summary['optimum_s']:.3f}"
            if setting["ratio"] not in (1, None):
                what += f" (ratio {setting['ratio']:g})"
            if setting.get("ranks_per_host", 1) > 1:
                what += f" ({setting['ranks_per_host']} ranks a host)"
            if setting["late"] != 1:
                what += f" (last host {setting['late']:g} times as long)"
            if bounds := cell.get("clip_bounds"):
                what += " (clipped)"
                optimum += f" (whole all-reduces: {bounds['unsplit_s']:.3f})"
            for name, system in summary["systems"].items():
                measured = cell["systems"][name]
                seconds = measured["seconds"]
                rows.append([
                    f"{what}, {setting['hosts']}, {setting['rate_mbit']:g}",
                    f"{summary['local_s']:.3f}", f"{summary['wire_s']:.3f}", optimum,
                    f"{name} ({measured['note']})" if measured["note"] else name,
                    f"{system['step_s']:.3f}", f"{min(seconds):.3f} to {max(seconds):.3f}",
                    _over_optimum(system), _over_ours(cell["systems"], name),
                    f"{100 * system['link_use']:.0f} %",
                    f"{statistics.mean(measured['cpu_s']):.2f}", run.commit,
                ])  # fmt: skip
    header = ("model, hosts, Mbit/s", "local s", "wire s", "optimum s", "system", "step s",
              "range", "/ optimum", "/ hvd_order", "link", "processor s", "commit")  # fmt: skip
    return table(header, rows)


def _over_optimum(system: Mapping[str, Any]) -> str:
    """Beside it over the optimum with the bytes that the system sends, where these are fewer."""
    over = system["over_optimum"]
    own = system.get("over_own", over)
    return f"{over:.3f}" + ("" if own == over else f" (with its bytes: {own:.3f})")


def _over_ours(systems: Mapping[str, Any], name: str) -> str:
    if name == "hvd_order" or "hvd_order" not in systems:
        return ""
    return str(paired_ratio(systems[name]["seconds"], systems["hvd_order"]["seconds"]))


def _ranks_of_one_host(runs: Sequence[Document]) -> list[str]:
    """Step, processor time, context switches, messages and threads of each system."""
    rows = []
    for run in runs:
        model = run.content["settings"]["model"]
        for summary in run.content["summary"]["rows"]:
            ranks = summary["ranks"]
            for name, system in summary["systems"].items():
                ratio = system["over_ddp"]
                threads = system["threads"]
                rows.append([
                    f"{model}, {ranks}", name, f"{1e3 * system['step_s']:.1f}",
                    "" if name == "ddp" else f"{ratio['median']:.3f}",
                    "" if name == "ddp" else f"{ratio['low']:.3f} to {ratio['high']:.3f}",
                    f"{1e3 * system['cpu_s'] / ranks:.1f}", f"{system['switches'] / ranks:.0f}",
                    f"{system['messages']:.1f}", f"{threads[0]}, {threads[-1]}", system["note"],
                    run.commit,
                ])  # fmt: skip
    header = ("model, ranks", "system", "step ms", "/ DDP", "interval", "processor ms a rank",
              "switches a rank", "messages", "threads of rank 0, last", "settings",
              "commit")  # fmt: skip
    return table(header, rows)


def _language_loops(runs: Sequence[Document]) -> list[str]:
    """Step, processor time, bytes and state of each system."""
    rows = []
    for run in runs:
        settings = run.content["settings"]
        for name, one in run.content["summary"]["systems"].items():
            rows.append([
                f"{settings['model']}, {settings['hosts']}, {settings['rate_mbit']:g}", name,
                f"{one['step_s']:.3f}",
                f"{one['of_ddp']:.3f}", f"{one['of_ddp_low']:.3f} to {one['of_ddp_high']:.3f}",
                f"{one['cpu_s']:.2f}", f"{one['sent_bytes'] / 1e6:.0f}",
                f"{one['state_bytes'] / 1e6:.1f}", f"{one['state_of_ddp']:.3f}", run.commit,
            ])  # fmt: skip
    header = ("model, hosts, Mbit/s", "system", "step s", "/ DDP", "interval", "processor s",
              "sent MB", "state MB a rank", "/ DDP's", "commit")  # fmt: skip
    return table(header, rows)


def _simulated_jobs(runs: Sequence[Document]) -> list[str]:
    """Simulated jobs of 1,024 ranks or the most there are."""
    sizes = [row["ranks"] for run in runs for row in run.raw.get("steps", ())]
    most = 1024 if 1024 in sizes else max(sizes, default=0)
    steps = [
        [f"{row['model']}, {row['rate_gbit']:g} Gbit/s", row["agreement"],
         f"{1e3 * row['step_s']:.1f}", f"{1e3 * row['added_s']:.2f}",
         f"{100 * row['added_s'] / row['step_s']:.2f} %", f"{1e3 * row['decision_s']:.2f}",
         str(row["fan_out"]), f"{row['busiest_messages']:.0f}",
         f"{row['busiest_bytes'] / 1024:.0f}", run.commit]
        for run in runs
        for row in run.raw.get("steps", ())
        if row["ranks"] == most
    ]  # fmt: skip
    return [
        f"Simulated, {most:,} ranks:",
        "",
        *table(("model, link", "agreement", "step ms", "added ms", "of the step", "decision ms",
                "fan-out", "busiest rank's messages", "KiB", "commit"), steps),
    ]  # fmt: skip


def _gpu_checks(runs: Sequence[Document]) -> list[str]:
    """What each check said when it ran last."""
    rows = []
    for name, (one, run) in last_outcomes(runs).items():
        missed = f"missed: {one['missed']}; " if one.get("missed") else ""
        said = missed + one["text"] if "text" in one else "an error"
        rows.append([name, one["outcome"], said, one.get("backend") or "", run.commit])
    return table(("check", "outcome", "what it found", "over", "commit"), rows)


def _nodes(runs: Sequence[Document]) -> list[str]:
    """Step and communication that nothing hides, of each system."""
    rows = []
    for run in runs:
        gpus = ", ".join(run.content["machine"].get("gpus", ["CPU"]))
        ranks = run.content["settings"]["ranks"]
        for summary in run.content["summary"]["rows"]:
            for name, system in summary["systems"].items():
                rows.append([
                    f"{summary['model']}, {ranks}, {gpus}",
                    f"{run.content['summary']['link_gbit']:.0f}",
                    f"{name} ({system['note']})" if system["note"] else name,
                    f"{1e3 * system['step_s']:.1f}", f"{system['over_local']:.3f}",
                    f"{1e3 * system['exposed_s']:.1f}",
                    "" if (seconds := system["profiled_exposed_s"]) is None
                    else f"{1e3 * seconds:.1f}",
                    run.commit,
                ])  # fmt: skip
    header = ("model, ranks, device", "link Gbit/s", "system", "step ms", "/ local",
              "not hidden ms", "by profiler ms", "commit")  # fmt: skip
    return table(header, rows)


def _predictions(runs: Sequence[Document]) -> list[str]:
    """Predicted and measured steps/s of all workers, and the closed forms."""
    rows = []
    for run in runs:
        system = "TensorFlow, " if "strategy_cells" in run.raw else ""
        words = queues_of(run)
        queues = f", {words}" if words else ""
        for cell in run.raw.get("cells", run.raw.get("strategy_cells", ())):
            forms = (cell["mean_value"], cell["bound"], cell["fitted"])
            rows.append([
                f"{system}{cell['model']}, {cell['rate_mbit']:g}{queues}", cell["mode"],
                str(cell["workers"]), f"{cell['measured']:.2f}", f"{cell['predicted']:.2f}",
                f"{cell['error']:+.1%}",
                *("" if form is None else f"{form:.2f}" for form in forms), run.commit,
            ])  # fmt: skip
    header = ("model, Mbit/s", "mode", "workers", "measured", "predicted", "error", "mean value",
              "bound", "Optimus, Pollux", "commit")  # fmt: skip
    published = [
        [application, split, *(f"{statistics.median(each):.1%}" for each in errors.values()),
         run.commit]
        for run in runs
        for application, splits in run.raw.get("published", {}).items()
        for split, errors in splits.items()
    ]  # fmt: skip
    if not published:
        return table(header, rows)
    return [
        *table(header, rows),
        "",
        "Published measurements of Pollux, numbers of nodes, median errors of two forms:",
        "",
        *table(("application", "fitted to -> predicted", "Pollux'",
                "workers of a node share its link", "commit"), published),
    ]  # fmt: skip


TABLES: Mapping[str, Callable[[Sequence[Document]], list[str]]] = {
    "gpu": _gpu_checks,
    "nodes": _nodes,
    "one_host": _ranks_of_one_host,
    "prediction": _predictions,
    "scale": _simulated_jobs,
    "sharded": _language_loops,
    "side_by_side": _cells,
}
"""Makes the table from the benchmark's result files, newest first."""
