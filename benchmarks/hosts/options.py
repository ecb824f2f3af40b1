"""How emulated hosts queue packets, as options of a benchmark."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .emulated import QUEUE_MS

if TYPE_CHECKING:
    from benchmarks.runner.question import Option

__all__ = ["queue_options", "queues"]


def queue_options() -> list[Option]:
    """How hosts queue packets; see `queues`."""
    from benchmarks.runner.question import option  # which asks this package what is missing here

    return [
        option("--queue-ms", QUEUE_MS, "length of the queues of hosts and switch"),
        option("--acks-first", False, "acknowledgments do not wait behind data, as with fq_codel"),
    ]


def queues(options: argparse.Namespace) -> dict[str, Any]:
    """The options as arguments of `EmulatedHosts`."""
    return {"acks_first": options.acks_first, "queue_ms": options.queue_ms}
