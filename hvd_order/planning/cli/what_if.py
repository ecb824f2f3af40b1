"""Options of ``hvd-order advise`` and ``hvd-order plan``, and what they print."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_order.base.link.advice import Outlook, advise
from hvd_order.planning.cli.network_options import (
    add_clipped_option,
    add_network_options,
    network_from,
)
from hvd_order.planning.files.profile import Profile, read_profile
from hvd_order.planning.report.output import Output, add_json_option, write_json

if TYPE_CHECKING:
    from hvd_order.planning.predict.what_if import WhatIf

__all__ = ["add_advise_options", "add_plan_options", "advise_main", "plan_main"]

_FACTORS = (1 / 10, 1 / 4, 1 / 2, 1, 2, 4, 10)
_USUAL_RATES = (1e9 / 8, 10e9 / 8, 25e9 / 8, 100e9 / 8)
_USUAL_RANKS = 8


def add_advise_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    parser.add_argument("profile", type=Path, help="file that hvd-order profile wrote")
    add_network_options(parser)
    add_clipped_option(parser)
    add_json_option(parser)


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the sub-command's parser."""
    add_advise_options(parser)
    add = parser.add_argument
    add("--servers", type=int, metavar="N",
        help="parameter servers with links like the workers' (default: all-reduce)")  # fmt: skip
    add("--png", type=Path, metavar="FILE",
        help="the picture (default: beside the profile); needs matplotlib")  # fmt: skip
    add("--no-png", action="store_true", help="no picture file")
    add("--html", type=Path, metavar="FILE", help="a page with text and picture")


def _numbers(profile: Profile, networks: Sequence[WhatIf]) -> dict[str, object]:
    """The outlooks on some networks; all times in seconds, rates in bytes per second."""
    rows = []
    for what_if in networks:
        outlook = what_if.outlook()
        advice = advise(outlook)
        rows.append(
            {
                "bytes_per_s": what_if.network.bytes_per_s,
                **dataclasses.asdict(outlook),
                "gain": outlook.gain,
                "possible_gain": outlook.possible_gain,
                "coded_gradients": len(what_if.coded),
                "mode": advice.mode,
                "reason": advice.reason,
            }
        )
    return {"model": profile.model, "networks": rows}


def advise_main(parsed: argparse.Namespace) -> int:
    """Prints what ordering can gain, on this and on other networks.

    Raises:
        InvalidUsage: the profile is none, or the options make no sense.
        OSError: the profile cannot be read.
    """
    from hvd_order.planning.predict.network import LANES, USUAL_LATENCY_S, Network
    from hvd_order.planning.predict.what_if import WhatIf
    from hvd_order.planning.report.what_if import advice_text

    profile = read_profile(parsed.profile)
    if parsed.ranks == 1 and parsed.json:
        write_json(_numbers(profile, []))
        return 0
    if parsed.ranks == 1:
        compute_s = profile.graph("median").compute_s
        alone = Outlook(1, compute_s, 0.0, compute_s, compute_s, compute_s, compute_s)
        sys.stdout.write(f"{profile.model}: {advise(alone).reason}, so there is nothing to order\n")
        return 0
    graph = profile.graph("median")
    if _is_open(parsed, profile):
        lanes = LANES["nccl" if profile.clock == "cuda_event" else "gloo"]
        ranks = parsed.ranks or _USUAL_RANKS
        latency_s = USUAL_LATENCY_S if parsed.latency is None else parsed.latency
        networks = [Network.of_ring(ranks, rate, latency_s, lanes) for rate in _USUAL_RATES]
        here = None
    else:
        network = network_from(parsed, profile)
        rate = network.bytes_per_s
        networks = [network if f == 1 else network.at_rate(f * rate) for f in _FACTORS]
        here = _FACTORS.index(1)
    what_ifs = [
        WhatIf(graph, network, clipped=parsed.clipped, encodes=_encodes(profile))
        for network in networks
    ]
    if parsed.json:
        write_json(_numbers(profile, what_ifs))
        return 0
    sys.stdout.write(advice_text(profile.model, what_ifs, here))
    if here is None:
        sys.stdout.write("\nFor advice name your network: --bandwidth 10gbit --ranks 8\n")
    return 0


def plan_main(parsed: argparse.Namespace) -> int:
    """Prints the table, and draws the picture and writes the page that were asked for.

    Raises:
        InvalidUsage: the profile is none, or the network is not known.
        ImportError: there is no matplotlib for the picture.
        OSError: a file cannot be read or written.
    """
    from hvd_order.planning.predict.what_if import WhatIf
    from hvd_order.planning.report.gantt import draw_steps
    from hvd_order.planning.report.what_if import report_of

    profile = read_profile(parsed.profile)
    network = network_from(parsed, profile)
    what_if = WhatIf(
        profile.graph("median"), network, parsed.servers, parsed.clipped, _encodes(profile)
    )
    steps = [what_if.step(name) for name in what_if.ways]
    ours = -2 if what_if.ways[-1] == "coded" else -1
    if parsed.json:
        ways = [{"title": step.title, "step_s": step.step_s} for step in steps]
        numbers = {"model": profile.model, "bound_s": what_if.bound_s, "steps": ways,
                   "coded": what_if.coded}  # fmt: skip
        write_json(numbers)
        return 0
    report = report_of(profile.model, what_if, steps)
    png = None if parsed.no_png else parsed.png or parsed.profile.with_suffix(".plan.png")
    Output(png, parsed.html).write(
        report,
        lambda: draw_steps(
            f"{profile.model}: {network}", [steps[0], *steps[ours:]], what_if.bound_s
        ),
        "Gantt picture of the steps",
    )
    return 0


def _encodes(profile: Profile) -> bool:
    """Whether the profiled program's framework has ``Compression.auto``."""
    return "tensorflow" not in profile.machine


def _is_open(parsed: argparse.Namespace, profile: Profile) -> bool:
    """Whether the speed of the network is unknown."""
    return parsed.bandwidth is None and (profile.link is None or profile.link.ranks < 2)
