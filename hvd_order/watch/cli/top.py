"""``hvd-order top``: where the time of a running job's steps goes, live."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from hvd_order.base.errors import InvalidUsage, PeerLost

if TYPE_CHECKING:
    from hvd_order.watch.channel.notes import JobNote, ReportNote
    from hvd_order.watch.channel.reader import JobView

__all__ = ["add_options", "main"]

_EVERY_S = 1.0
_NO_REPORT = (
    "has no report yet: one comes about every ten steps of a distributed optimizer; "
    "`hvd-order doctor --job` says where its ranks are"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    parser.add_argument("job", nargs="?", default="", metavar="JOB",
        help="process id of its rank 0 on this host, or HOST:PORT where its ranks meet "
        "(default: your only job whose rank 0 runs here)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--follow", action="store_true",
        help="with --json: print a line for each new report until the job ends")  # fmt: skip


def main(parsed: argparse.Namespace) -> int:
    """Shows a job until it ends or Ctrl-C; once, if the output is no terminal.

    Raises:
        InvalidUsage: there is no such job, or rich is not installed.
        PeerLost: it cannot be reached, or has no report where one is wanted at once.
    """
    from hvd_order.watch.channel.reader import find_job

    if parsed.follow and not parsed.json:
        raise InvalidUsage("--follow is for --json; without it, top follows anyway")
    view = find_job(parsed.job)
    try:
        if parsed.json:
            return _print_json(view, parsed.follow)
        return _show(view)
    except KeyboardInterrupt:
        return 0


def _print_json(view: JobView, follow: bool) -> int:
    job = view.job()
    shown_at = None
    while True:
        try:
            report = view.report()
        except PeerLost:
            if shown_at is None:
                raise
            return 0  # it has ended
        if report is None and not follow:
            raise PeerLost(f"the job at {view.address} {_NO_REPORT}")
        if report is not None and report.at != shown_at:
            shown_at = report.at
            json.dump(_document(view.address, job, report), sys.stdout)
            sys.stdout.write("\n")
            sys.stdout.flush()
        if not follow:
            return 0
        time.sleep(_EVERY_S)


def _document(address: str, job: JobNote, report: ReportNote) -> dict[str, Any]:
    """The job as JSON: the account of every rank, by optimizer."""
    return {
        "store": address,
        "began": job.began,
        "at": report.at,
        "hosts": list(job.hosts),
        "processes": list(job.processes),
        "optimizers": {
            key: {
                "way": stats[0].way if stats else "",
                "slow_rank": stats[0].slow_rank if stats else -1,
                "slow_cause": stats[0].slow_cause if stats else "",
                "slow_detail": stats[0].slow_detail if stats else "",
                "ranks": {
                    str(rank): each.as_dict()
                    for rank, each in zip(report.ranks[key], stats, strict=True)
                },
            }
            for key, stats in report.stats.items()
        },
    }


def _show(view: JobView) -> int:
    try:
        from hvd_order.watch.cli.screen import Screen
    except ImportError:
        raise InvalidUsage(
            "hvd-order top draws with rich: pip install 'hvd_order[top]', or pip install rich; "
            "`--json` needs nothing"
        ) from None
    job, report = view.job(), view.report()
    screen = Screen(view.address, job)
    if not sys.stdout.isatty():
        if report is None:
            raise PeerLost(f"the job at {view.address} {_NO_REPORT}")
        screen.print(report)
        return 0
    with screen.live() as update:
        while True:
            update(report, _NO_REPORT)
            time.sleep(_EVERY_S)
            try:
                report = view.report() or report
            except PeerLost as error:
                last = str(error)
                break
    sys.stdout.write(f"{last}\n")
    return 0
