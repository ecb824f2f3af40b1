"""Options of ``hvd-order check`` and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from hvd_order.tools.check.run import check_paths, counts

__all__ = ["add_options", "main"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="scripts or folders")
    parser.add_argument(
        "--select", type=_codes, default=[], metavar="CODES", help="report these alone: HVD1,HVD201"
    )
    parser.add_argument(
        "--ignore", type=_codes, default=[], metavar="CODES", help="do not report these"
    )
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def main(parsed: argparse.Namespace) -> int:
    """Prints what was found, and how much was read.

    Returns:
        1 when there was a mistake, else 0; notes are no mistakes.

    Raises:
        InvalidUsage: no such file or code.
        OSError, UnicodeDecodeError: a file cannot be read.
    """
    checked = check_paths(parsed.paths, parsed.select, parsed.ignore)
    if parsed.json:
        rows = [dataclasses.asdict(one) for one in checked.findings]
        sys.stdout.write(json.dumps({"findings": rows}, indent=1) + "\n")
        return int(counts(checked.findings))
    for one in checked.findings:
        sys.stdout.write(f"{one}\n")
    sys.stdout.write(f"{checked.summary()}\n")
    return int(counts(checked.findings))


def _codes(text: str) -> list[str]:
    return [code.strip().upper() for code in text.split(",")]
