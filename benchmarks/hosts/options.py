"""How emulated hosts queue packets, as options of a benchmark."""

from __future__ import annotations

import argparse
from typing import Any

from .emulated import QUEUE_MS

__all__ = ["add_queue_options", "queues"]


def add_queue_options(parser: argparse.ArgumentParser) -> None:
    """How hosts queue packets; see `queues`."""
    parser.add_argument(
        "--queue-ms", type=float, default=QUEUE_MS, help="length of the queues of hosts and switch"
    )
    parser.add_argument(
        "--acks-first",
        action="store_true",
        help="acknowledgments do not wait behind data, as with fq_codel",
    )


def queues(options: argparse.Namespace) -> dict[str, Any]:
    """The options as arguments of `EmulatedHosts`."""
    return {"acks_first": options.acks_first, "queue_ms": options.queue_ms}
