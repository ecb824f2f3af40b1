"""Options of ``hvd-order doctor`` and what it prints."""

from __future__ import annotations

import argparse
import json
import sys

from hvd_order.tools.doctor import health

__all__ = ["add_options", "main"]

_SELF_TEST_S = 60.0
_ANSWERS_S = 5.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    parser.add_argument(
        "--health", action="store_true", help="only look at the installation, without PyTorch"
    )
    parser.add_argument("--job", nargs="?", const="", metavar="JOB",
        help="where each rank of a running job is, named as for hvd-order top")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="for a self-test, 60 s; for answers of a job, 5 s",
    )


def main(parsed: argparse.Namespace) -> int:
    """Prints the report.

    Returns:
        0 when two ranks could work together, or all ranks of the job have answered; else 1.
    """
    if parsed.health:
        return health.main()
    if parsed.job is not None:
        from hvd_order.watch.cli import places

        return places.main(parsed.job, parsed.timeout or _ANSWERS_S, parsed.json)
    from hvd_order.tools.doctor.report import examine, text_of

    report = examine(parsed.timeout or _SELF_TEST_S)
    text = json.dumps(report, indent=2) if parsed.json else text_of(report)
    sys.stdout.write(text + "\n")
    return 0 if report["healthy"] else 1
