"""Emulated hosts on one machine: network namespaces joined by links of a chosen rate."""

from .emulated import QUEUE_MS, EmulatedHosts
from .namespaces import HostsUnavailable, why_not
from .options import queue_options, queues

__all__ = [
    "QUEUE_MS",
    "EmulatedHosts",
    "HostsUnavailable",
    "queue_options",
    "queues",
    "why_not",
]
