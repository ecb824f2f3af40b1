"""Emulated hosts on one machine: network namespaces joined by links of a chosen rate."""

from .emulated import QUEUE_MS, EmulatedHosts
from .namespaces import HostsUnavailable, why_not

__all__ = [
    "QUEUE_MS",
    "EmulatedHosts",
    "HostsUnavailable",
    "why_not",
]
