"""Elastic training without a framework: states, commits, and how a job continues.

`hvd_order.torch.elastic` has the names that users see; docs/guides/elastic.md has an overview.
"""

from hvd_order.base.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvd_order.launch.elastic.run import run_fn
from hvd_order.launch.elastic.state import ObjectState, State

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "run_fn",
]
