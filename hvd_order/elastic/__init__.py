"""Elastic training without a framework: states, commits, and how a job continues.

`hvd_order.torch.elastic` has the names that users see; docs/guides/elastic.md has an overview.
"""

from hvd_order.elastic.run import run_fn
from hvd_order.elastic.state import ObjectState, State
from hvd_order.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "run_fn",
]
