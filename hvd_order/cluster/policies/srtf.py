"""Shortest remaining time first."""

from __future__ import annotations

from hvd_order.cluster.policies.allocation.book import Book
from hvd_order.cluster.policies.allocation.ranking import by_rank
from hvd_order.cluster.policies.interface import JobState, PolicyDecision, View

__all__ = ["Srtf"]


class Srtf:
    """Runs the jobs that would end soonest with the workers that they ask for; stops others for
    them.

    A job stops only if that is worth the time for which it will stand still when it goes on: of two
    jobs, with a and b left, that cannot run together, stopping the second one for the first lowers
    the sum of the completion times if a + resize < b.
    """

    def __init__(self) -> None:
        self._book = Book(elastic=False)

    def decide(self, view: View) -> PolicyDecision:
        """Ranks all jobs by what is left of them."""
        decision = PolicyDecision()

        def rank(state: JobState) -> tuple[float, bool, int]:
            left_s = self._book.remaining_s(view, state)
            if state.placement is not None:
                left_s -= view.resize_s
            return left_s, state.placement is None, state.number

        ranked = sorted(self._book.jobs(view, decision), key=rank)
        decision.place = by_rank(view, ranked, self._book.workers)
        return decision
