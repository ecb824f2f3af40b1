"""Results as tables on the screen and as JSON in ``out/benchmarks``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from common.environment import ROOT


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def write(question: str, environment: dict[str, Any], results: dict[str, Any]) -> None:
    """Puts everything that was measured in ``out/benchmarks/<question>.json``."""
    path = ROOT / "out" / "benchmarks" / f"{question}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"question": question, "environment": environment, **results}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"all measurements: {path.relative_to(ROOT)}")
