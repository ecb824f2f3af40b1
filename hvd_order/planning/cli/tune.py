"""Options of ``hvd-order tune``, and the table that it prints."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_order.base.link.slice_settings import SliceSettings
from hvd_order.planning.cli.network_options import (
    add_clipped_option,
    add_network_options,
    network_from,
)
from hvd_order.planning.files.profile import read_profile
from hvd_order.planning.report.output import add_json_option, write_json
from hvd_order.planning.report.page import ms_text

if TYPE_CHECKING:
    from hvd_order.planning.predict.setting_search import Outcome
    from hvd_order.planning.predict.tune import Tuned

__all__ = ["add_options", "main"]

_SHOWN = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    parser.add_argument("profile", type=Path, help="file that hvd-order profile wrote")
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN",
        help="file for the plan (default: none is written)")  # fmt: skip
    add_network_options(parser)
    add_clipped_option(parser)
    add_json_option(parser)


def main(parsed: argparse.Namespace) -> int:
    """Searches, prints and writes.

    Returns:
        The exit code.

    Raises:
        InvalidUsage: the profile is none, or the network is not known.
        OSError: a file cannot be read or written.
    """
    from hvd_order.planning.predict.tune import tune

    profile = read_profile(parsed.profile)
    network = network_from(parsed, profile)
    begin_s = time.perf_counter()
    tuned = tune(profile.graph("median"), network, profile.model, clipped=parsed.clipped)
    took_s = time.perf_counter() - begin_s
    if parsed.output is not None:
        tuned.plan.write(parsed.output)
    if parsed.json:
        write_json(_numbers(profile.model, tuned))
        return 0
    sys.stdout.write(
        f"{profile.model}: {network}; {tuned.simulated} settings simulated in {took_s:.1f} s\n\n"
    )
    sys.stdout.writelines(line + "\n" for line in _table(tuned))
    if parsed.output is not None:
        sys.stdout.write(f"\n{parsed.output}: run with HVD_ORDER_PLAN={parsed.output}\n")
    return 0


def _numbers(model: str, tuned: Tuned) -> dict[str, object]:
    """What ``--json`` prints; times in seconds."""
    named = {"chosen": tuned.chosen, "default": tuned.default, "best": tuned.outcomes[0]}
    settings = {
        name: {
            "order": one.setting.order,
            "step_s": one.step_s,
            **asdict(one.setting.slice_settings),
        }
        for name, one in named.items()
    }
    return {"model": model, "bound_s": tuned.bound_s, "ddp_s": tuned.ddp_s,
            "simulated": tuned.simulated, "settings": settings}  # fmt: skip


def _table(tuned: Tuned) -> Iterator[str]:
    """Rows of step times, each beside the bound."""
    rows = [("chosen, in the plan", tuned.chosen)]
    rows += [("to be tried beside it", outcome) for outcome in tuned.rivals]
    rows += [("best simulated", outcome) for outcome in tuned.outcomes[:_SHOWN]]
    rows += [("default", tuned.default), *tuned.published.items()]
    clipped = tuned.whole is not None
    if tuned.whole is not None:
        rows.append(("best of whole sums", tuned.whole))
    form = f"{'sums':6} " if clipped else ""
    yield (
        f"{'':26} {'order':9} {'policy':9} {'agreement':11} {form}{'slices':>10} {'credit':>10} "
        f"{'step':>10} {'x bound':>8}"
    )
    for name, outcome in rows:
        yield _row(name, outcome, tuned.bound_s, clipped)
    left = " " * (53 + len(form))
    for name, step_s in (("DDP, buckets of 25 MiB", tuned.ddp_s), ("bound", tuned.bound_s)):
        yield f"{name:26} {left} {ms_text(step_s):>10} {_ratio(step_s, tuned.bound_s)}"


def _row(name: str, outcome: Outcome, bound_s: float, clipped: bool) -> str:
    setting = outcome.setting
    settings: SliceSettings = setting.slice_settings
    form = f"{'halves' if settings.split else 'whole':6} " if clipped else ""
    return (
        f"{name:26} {setting.order:9} {settings.policy:9} {setting.agreement:11} {form}"
        f"{settings.slice_bytes / 2**10:6.0f} KiB {settings.credit_bytes / 2**10:6.0f} KiB "
        f"{ms_text(outcome.step_s):>10} {_ratio(outcome.step_s, bound_s)}"
    )


def _ratio(step_s: float, bound_s: float) -> str:
    return f"{step_s / bound_s:8.3f}" if bound_s else ""
