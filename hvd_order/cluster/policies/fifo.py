"""First in, first out."""

from __future__ import annotations

from hvd_order.cluster.policies.interface import PolicyDecision, View
from hvd_order.cluster.policies.packing import pack, take

__all__ = ["Fifo"]


class Fifo:
    """Gives each job the workers that it asks for, in order of arrival; the first that does not
    fit blocks the others.
    """

    def decide(self, view: View) -> PolicyDecision:
        """Starts waiting jobs."""
        decision = PolicyDecision()
        free = view.free.copy()
        for name, state in view.waiting.items():
            placement = pack(state, state.job.requested, free)
            if placement is None:
                break
            take(free, state, placement)
            decision.place[name] = placement
        return decision
