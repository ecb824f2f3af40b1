"""What the account tells on the log of rank 0: a line every so many steps, and slow ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hvd_order.base.account.slow_ranks import Verdict
from hvd_order.base.account.step_stats import StepStats

__all__: list[str] = []

_log = logging.getLogger("hvd_order")
_lines = logging.getLogger("hvd_order.report")

_LONGER = {
    "loader": "what comes before its forward pass (the loader) takes longer than on the others",
    "forward pass": "its forward pass, or what comes before it, takes longer than on the others",
    "backward pass": "its backward pass takes longer than on the others",
    "update": "the optimizer's update takes longer than on the others",
    "host": "what it does between backward() and the end of step() takes longer than on the others",
    "cores": "its training thread waits for a core: more threads want to run than there are cores",
}


class Told:
    """The messages about one optimizer."""

    def __init__(self, speaks: bool, ranks: Sequence[int], every: int | None) -> None:
        """Says nothing yet.

        Args:
            speaks: this is rank 0 of the set.
            ranks: ranks in the job, by place.
            every: steps between two lines (HVD_ORDER_REPORT); None: no lines.
        """
        self._speaks = speaks
        self._ranks = ranks
        self._every = every
        self._steps = 0
        if every is not None:  # the user has asked for it, whatever the level of the others
            _lines.setLevel(logging.INFO)

    def stats(self, mine: StepStats, everyone: Sequence[StepStats]) -> None:
        """Writes a line if one is due."""
        if not self._speaks or self._every is None or mine.steps < self._steps + self._every:
            return
        self._steps = mine.steps
        _lines.info(line_of(mine, everyone))

    def slow(
        self, found: Verdict, begins: bool, host: str, detail: str, clock_error_s: float
    ) -> None:
        """Tells that a rank or a link has become slow, or is no longer."""
        if not self._speaks:
            return
        who = f"rank {self._ranks[found.place]} on host {host}"
        if found.host >= 0:
            who = f"the link of host {detail}"
        if not begins:
            _log.warning("%s no longer holds up the other ranks", who)
            return
        why = _LONGER.get(found.cause, "")
        if found.host >= 0:
            why = "bytes travel more slowly there than on the links of the other hosts"
        elif detail:
            why += f", from the gradient of {detail} on"
        _log.warning(
            "%s holds up the other ranks: %s. It costs %.0f of %.0f ms of each step (%.0f ms "
            "without it; clocks were compared to %.3g ms); `optimizer.stats()` has the parts",
            who, why, 1e3 * found.delay_s, 1e3 * found.step_s,
            1e3 * (found.step_s - found.delay_s), 1e3 * clock_error_s,
        )  # fmt: skip


def line_of(mine: StepStats, everyone: Sequence[StepStats]) -> str:
    """Returns one line about the last steps of all ranks: means of the ranks, in ms."""

    def mean(name: str) -> float:
        return 1e3 * float(sum(getattr(each, name) for each in everyone)) / len(everyone)

    slow = ""
    if mine.slow_rank >= 0:
        slow = f"; slow: rank {mine.slow_rank} ({mine.slow_cause}, {1e3 * mine.slow_s:.0f} ms)"
    return (
        f"step {mine.steps}: {mean('step_s'):.0f} ms = {mean('compute_s'):.0f} compute + "
        f"{mean('exposed_s'):.0f} exposed ({mean('late_s'):.0f} late, {mean('queue_s'):.0f} queue, "
        f"{mean('transfer_s'):.0f} transfer) + {mean('update_s'):.0f} update + "
        f"{mean('host_s'):.0f} host; {100 * mean('overlap') / 1e3:.0f} % of communication "
        f"overlaps; {mine.wire_bytes / 1e6:.3g} MB{slow}"
    )
