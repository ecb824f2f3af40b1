"""Options of ``hvd-order doctor`` and what it prints."""

from __future__ import annotations

import argparse
import json
import sys

from hvd_order.tools.doctor import health

__all__ = ["add_options", "main"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    parser.add_argument(
        "--health", action="store_true", help="only look at the installation, without PyTorch"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="for a self-test; default 60 s"
    )


def main(parsed: argparse.Namespace) -> int:
    """Prints the report.

    Returns:
        0 when two ranks could work together, else 1.
    """
    if parsed.health:
        return health.main()
    from hvd_order.tools.doctor.report import examine, text_of

    report = examine(parsed.timeout)
    text = json.dumps(report, indent=2) if parsed.json else text_of(report)
    sys.stdout.write(text + "\n")
    return 0 if report["healthy"] else 1
