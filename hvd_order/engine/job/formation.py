"""A name for each formation of a job whose ranks meet in a store that outlives them.

torchrun's agents keep one store while they live, so the keys of ranks that have died are still
there when others take their places. No variable tells formations apart: an agent counts the
failures of its own workers alone (TORCHELASTIC_RESTART_COUNT), so agents may count differently.

Rank 0 announces a new name. Each other rank leaves a mark under it, and when all have, rank 0 shows
all marks. A rank that finds its own mark among them knows that this rank 0 lives. What an earlier
rank 0 left shows the marks of an earlier formation, and is passed over.

This needs an earlier formation to be over when a new one begins. So it is: an agent stops its
workers before it joins the next round, and starts others when all agents have joined.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store

from hvd_order.base.bounded import answer_s, within
from hvd_order.base.errors import TransferTimeout
from hvd_order.base.store_errors import first_line
from hvd_order.launch.environment import RankInfo

__all__ = ["formation_name"]

Answer = TypeVar("Answer")

_NEWEST = "newest"
_LOOK_S, _LONGEST_LOOK_S = 0.02, 0.5


def formation_name(store: Store, info: RankInfo, timeout: timedelta) -> str:
    """Returns a name that all ranks of this formation get, and no others. Collective.

    Args:
        store: store that may hold keys of earlier formations; all its keys are of this function.

    Raises:
        TransferTimeout: not all ranks arrived in time, or the store does not answer.
    """
    formation = _FormationRendezvous(store, info, timeout)
    return formation.lead() if info.rank == 0 else formation.follow()


class _FormationRendezvous:
    def __init__(self, store: Store, info: RankInfo, timeout: timedelta) -> None:
        self._store, self._info, self._timeout = store, info, timeout
        self._deadline = time.monotonic() + timeout.total_seconds()

    def lead(self) -> str:
        """Announces a name, and shows the marks."""
        name = secrets.token_hex(8)
        others = range(1, self._info.size)
        self._ask(lambda: self._store.set(_NEWEST, name))
        marks = dict.fromkeys(others, "")

        def all_left_marks() -> bool:
            for rank in others:
                marks[rank] = marks[rank] or self._read(f"{name}/{rank}")
            return all(marks.values())

        if not self._until(all_left_marks):
            missing = [rank for rank in others if not marks[rank]]
            raise TransferTimeout(
                f"init(): rank 0 waited {self._timeout.total_seconds():g} s for ranks {missing} of "
                f"{self._info.size}, which did not arrive; look at their output"
            )
        self._ask(lambda: self._store.set(f"{name}/all", json.dumps(marks)))
        return name

    def follow(self) -> str:
        """Leaves a mark under each name that is announced, until one shows it."""
        mark = secrets.token_hex(8)

        def name_that_shows_it() -> str:
            name = self._read(_NEWEST)
            if not name:
                return ""
            self._store.set(f"{name}/{self._info.rank}", mark)
            shown = json.loads(self._read(f"{name}/all") or "{}")
            return name if shown.get(str(self._info.rank)) == mark else ""

        name = self._until(name_that_shows_it)
        if not name:
            raise TransferTimeout(
                f"init(): rank {self._info.rank} waited {self._timeout.total_seconds():g} s at "
                f"{self._where()} for rank 0, which waits for all ranks; the output of rank 0 says "
                "which did not arrive"
            )
        return name

    def _read(self, key: str) -> str:
        """What the store has; empty: nothing."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _until(self, look: Callable[[], Answer]) -> Answer:
        """Looks until there is an answer, or time is over."""
        pause_s = _LOOK_S
        while True:
            answer = self._ask(look)
            if answer or time.monotonic() > self._deadline:
                return answer
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_LOOK_S)

    def _ask(self, request: Callable[[], Answer]) -> Answer:
        try:
            return within(answer_s(self._timeout), request)
        except (TimeoutError, RuntimeError) as error:
            raise TransferTimeout(
                f"init(): rank {self._info.rank} got no answer from the store of torchrun's agent "
                f"at {self._where()} ({first_line(error)}); is the agent with rank 0 still there?"
            ) from error

    def _where(self) -> str:
        return f"{self._info.master_addr}:{self._info.master_port}"
