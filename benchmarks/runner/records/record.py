"""One JSON file a run: where it was measured, every measurement, and the summary."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.runner.records.environment import ROOT
from benchmarks.runner.records.schema import VERSION, problems

DEFAULT_FOLDER = ROOT / "out" / "results"
_NOT_SETTINGS = {"out", "worker"}
_DIGITS = 7  # of a number: a microsecond in ten seconds


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options that say what was measured."""
    return {
        name: [str(v) if isinstance(v, Path) else v for v in value]
        if isinstance(value, list | tuple)
        else value
        for name, value in sorted(vars(options).items())
        if name not in _NOT_SETTINGS
    }


def write_record(
    benchmark: str,
    environment: Mapping[str, Any],
    settings: Mapping[str, Any],
    raw: Mapping[str, Any],
    summary: Mapping[str, Any],
    out: Path | None = None,
) -> Path:
    """Writes the result file of a run, prints its table and says where it is.

    Args:
        benchmark: folder of benchmarks/.
        environment: of `common.environment.environment`, from the start of the run.
        settings: options, see `settings_of`.
        raw: every measurement, in seconds unless the benchmark's README says otherwise.
        summary: what the benchmark computed from them.
        out: the file; None: ``out/results/BENCHMARK.json``.

    Returns:
        The file.

    Raises:
        ValueError: what would be written is no valid result file (`common.schema`).
    """
    document = {
        "schema": VERSION,
        "benchmark": benchmark,
        **environment,
        "settings": settings,
        "raw": raw,
        "summary": summary,
    }
    plain = json.loads(json.dumps(_rounded(document)))  # tuples become lists, keys become text
    found = problems(plain)
    if found:
        raise ValueError(f"no valid result file: {'; '.join(found)}")
    path = (out or DEFAULT_FOLDER / f"{benchmark}.json").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(plain), "utf-8")
    if table := table_of(path):
        print(f"\n{table}\n")
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    print(f"all measurements: {shown}")
    return path


def table_of(path: Path) -> str:
    """The table that RUNS.md has of a result file; empty if it has none."""
    from benchmarks.results_page.documents import Document
    from benchmarks.results_page.tables import TABLES

    document = Document(path.name, json.loads(path.read_text("utf-8")))
    benchmark = document.content["benchmark"]
    return "\n".join(TABLES[benchmark]([document])) if benchmark in TABLES else ""


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(name): _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


def _text(document: dict[str, Any]) -> str:
    """JSON with objects on many lines and lists of plain values on one."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    flat = re.compile(r"\[\s*([^\[\]{}]*?)\s*\]")
    return flat.sub(lambda found: "[" + re.sub(r"\s*\n\s*", " ", found[1]) + "]", text) + "\n"
