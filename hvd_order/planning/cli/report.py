"""Options of ``hvd-order report``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["add_options", "main"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    parser.add_argument("trace", type=Path, help="file that HVD_ORDER_TIMELINE named")
    parser.add_argument("--html", type=Path, metavar="FILE",
        help="a page with the same, and bars")  # fmt: skip


def main(parsed: argparse.Namespace) -> int:
    """Prints the report, and writes the page if asked for.

    Returns:
        The exit code.

    Raises:
        InvalidUsage: the file is no timeline, or one without transfers.
        OSError: a file cannot be written.
    """
    from hvd_order.planning.report.trace.content import report_of, text_of
    from hvd_order.planning.report.trace.page import page_of
    from hvd_order.planning.report.trace_file import read_job_trace

    report = report_of(read_job_trace(parsed.trace), parsed.trace.name)
    sys.stdout.write(text_of(report))
    if parsed.html is not None:
        parsed.html.parent.mkdir(parents=True, exist_ok=True)
        parsed.html.write_text(page_of(report), encoding="utf-8")
        sys.stdout.write(f"\n{parsed.html}\n")
    return 0
