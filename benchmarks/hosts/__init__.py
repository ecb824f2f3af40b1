"""Emulated hosts on one machine: network namespaces joined by links of a chosen rate."""

from .emulated import EmulatedHosts
from .namespaces import HostsUnavailable, why_not

__all__ = ["EmulatedHosts", "HostsUnavailable", "why_not"]
