"""The ways to wait for sums on a device: L0, L1 and P of docs/decisions/device-waiting.md."""

from __future__ import annotations

from collections.abc import Mapping

WAITS: Mapping[str, Mapping[str, str]] = {
    "enqueued": {"HVD_ORDER_DEBUG": ""},
    "arrived": {"HVD_ORDER_DEBUG": "host_waits"},
    "planned": {"HVD_ORDER_DEBUG": "", "HVD_ORDER_AGREEMENT": "planned"},
}
"""Variables of the environment, by name."""
