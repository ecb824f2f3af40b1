"""The options that describe a network and what a program does, for all predicting commands.

Nothing here or in the commands needs the extension before they run: `hvd-order doctor` has to work
where it is not built.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.files.profile import Profile
from hvd_order.planning.predict.units import parse_duration, parse_rate

if TYPE_CHECKING:
    from hvd_order.planning.predict.network import Network

__all__ = ["add_clipped_option", "add_network_options", "as_option", "network_from"]

T = TypeVar("T")


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `network_from` reads."""
    parser.add_argument(
        "--bandwidth",
        type=as_option(parse_rate),
        metavar="RATE",
        help="of each worker's link, each way, as payload gets it: 10gbit, 1.2GB/s "
        "(default: as measured in the profile)",
    )
    parser.add_argument(
        "--latency",
        type=as_option(parse_duration),
        metavar="TIME",
        help="of one message between two workers: 50us, 0.2ms (default: as measured, or 50us)",
    )
    parser.add_argument(
        "--ranks", "--workers", type=int, metavar="N", help="how many (default: as measured)"
    )


def add_clipped_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--clipped``."""
    parser.add_argument(
        "--clipped",
        action="store_true",
        help="the program clips gradients by their global norm in every step; then sums in two "
        "halves (split all-reduces) are considered beside whole ones",
    )


def network_from(parsed: argparse.Namespace, profile: Profile) -> Network:
    """The network that the options and the profile describe; options win.

    Raises:
        InvalidUsage: something is missing, or makes no sense.
    """
    from hvd_order.planning.predict.network import LANES, USUAL_LATENCY_S, Network

    ranks: int | None = parsed.ranks
    rate: float | None = parsed.bandwidth
    latency_s: float | None = parsed.latency
    if ranks is not None and ranks < 1:
        raise InvalidUsage(f"--ranks is {ranks}; at least 1 is needed")
    measured = profile.link
    if measured is not None and measured.ranks > 1:
        network = Network.of_link(measured, ranks)
        if latency_s is not None:
            network = network.at_latency(latency_s)
        return network if rate is None else network.at_rate(rate)
    if rate is None or ranks is None:
        missing = [n for n, v in (("--bandwidth", rate), ("--ranks", ranks)) if v is None]
        raise InvalidUsage(
            f"the profile has no measured link, so {' and '.join(missing)} must be given, for "
            "example --bandwidth 10gbit --ranks 8; or record it with hvd-order profile -np 2"
        )
    usual_s = USUAL_LATENCY_S if latency_s is None else latency_s
    lanes = LANES["nccl" if profile.clock == "cuda_event" else "gloo"]
    return Network.of_ring(ranks, rate, usual_s, lanes)


def as_option(parse: Callable[[str], T]) -> Callable[[str], T]:
    """For argparse, which shows the message of its own kind of error only."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed
