"""What a command with a report writes: the text, and if asked for a picture and a page."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_order.planning.report.drawing import save
from hvd_order.planning.report.page import page_of, text_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hvd_order.planning.report.page import ReportContent

__all__ = ["Output", "add_json_option", "add_output_options", "write_json"]


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--png`` and ``--html``."""
    parser.add_argument("--png", type=Path, metavar="FILE", help="a picture; needs matplotlib")
    parser.add_argument("--html", type=Path, metavar="FILE", help="a page with text and picture")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def write_json(numbers: Mapping[str, Any]) -> None:
    """Prints what a program reads; docs/schemas says what is in it."""
    sys.stdout.write(json.dumps(_finite(numbers), indent=1) + "\n")


def _finite(value: Any) -> Any:
    """The same without numbers that JSON does not have: they become null."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Output:
    """Files beside the text; None: not asked for."""

    png: Path | None
    html: Path | None

    @property
    def draws(self) -> bool:
        """Whether there is a picture."""
        return self.png is not None or self.html is not None

    def write(self, report: ReportContent, draw: Callable[[], Figure], picture_is: str) -> None:
        """Prints the text, then draws the picture and writes the files.

        Args:
            picture_is: what it shows, for those who do not see it.

        Raises:
            ImportError: there is no matplotlib for the picture.
            OSError: a file cannot be written.
        """
        sys.stdout.write(text_of(report))
        if not self.draws:
            return
        figure = draw()
        if self.png is not None:
            save(figure, self.png)
            sys.stdout.write(f"\n{self.png}\n")
        if self.html is not None:
            self.html.parent.mkdir(parents=True, exist_ok=True)
            self.html.write_text(page_of(report, figure, picture_is), encoding="utf-8")
            sys.stdout.write(f"{self.html}\n")
