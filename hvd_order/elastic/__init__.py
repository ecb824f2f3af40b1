"""Elastic training without a framework: what a state is, where it survives, how a job goes on.

`hvd_order.torch.elastic` has the names that users see; docs/elastic.md has the whole picture.
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
