"""How busy the machine is, and how long jobs may wait there."""

from __future__ import annotations

import os

__all__ = ["BUSY", "TIMEOUT_S"]

BUSY = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
"""Processes that want a processor, for each that there is, when this run began."""

TIMEOUT_S = round(15 * min(6.0, max(1.0, BUSY / 1.5)))
"""HVD_ORDER_TIMEOUT of the jobs: 15 s, and more where a start takes as long as that."""
