"""Order of collectives: the next one is the one that every rank of its process set requested.
Pure.

Rank 0 keeps this table for all process sets. Ranks report their requests in any order. A request
runs on all ranks after the last rank has reported it; requests run in the order in which they
became complete (as in Horovod's coordinator). A joined rank counts as having made every request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hvd_order.engine.job.message_forms import Message, malformed
from hvd_order.engine.requests.mismatch import name_ranks

__all__ = ["NameOrder", "Outgoing", "key_of"]

Outgoing = list[tuple[int, Message]]  # (rank, message)
_UNNAMED = re.compile(r"\w+\.(noname\..+)")
_OF_A_MODEL = re.compile(r"(message \d+ about optimizer .*?): .*", re.DOTALL)  # model_channel.py


def key_of(name: str) -> str:
    """Returns the key that requests are matched by: the name, or the count for unnamed requests and
    for messages about a model.

    So an unnamed allreduce matches an unnamed allgather of another rank, and both ranks get an
    error instead of waiting for each other.
    """
    counted = _UNNAMED.fullmatch(name) or _OF_A_MODEL.fullmatch(name)
    return counted[1] if counted else name


@dataclass
class _Asked:
    """A request that not all ranks have made yet.

    Attributes:
        name: name given by the first rank.
        since: time of the first request, in seconds.
        digests: hash of each rank's description.
        replaceable: zeros can stand in for a joined rank.
        joined_take_part: ranks that have joined make the request by themselves.
        warned: the ranks know which ranks are missing.
    """

    name: str
    since: float
    digests: dict[int, str] = field(default_factory=dict)
    replaceable: bool = True
    joined_take_part: bool = False
    warned: bool = False


class NameOrder:
    """The table: takes events and returns messages, without thread, clock or transport.

    Returned messages are sent in their order, and before those of any later event.
    """

    def __init__(self, size: int, timeout_s: float, warning_s: float) -> None:
        """Creates the table; ``timeout_s``, ``warning_s``: how long a request may lack a rank."""
        self._size = size
        self._timeout_s = timeout_s
        self._warning_s = warning_s
        self._ranks: dict[int, Sequence[int]] = {}  # by process set
        self._asked: dict[int, dict[str, _Asked]] = {}
        self._failed: dict[int, Message] = {}
        self._gone: dict[int, tuple[str, str]] = {}  # (kind of error, text), by rank
        self._joined: list[int] = []
        self._steps: list[Message] = []  # the latest steps of the joined ranks
        self._unnamed: dict[str, int] = {}

    # ---- process sets ----

    def add_set(self, number: int, ranks: Sequence[int]) -> Outgoing:
        """Adds a process set; its other members may have made requests already."""
        self._ranks[number] = ranks
        return self._look_again([number])

    def remove_set(self, number: int) -> None:
        """Removes a process set."""
        self._ranks.pop(number, None)
        self._asked.pop(number, None)
        self._failed.pop(number, None)

    # ---- requests ----

    def requested(
        self, rank: int, number: int, name: str, digest: str, replaceable: bool | None, now: float
    ) -> Outgoing:
        """Handles the request of ``rank`` for the collective ``name`` of a process set.

        Args:
            rank, number, name, digest: see the class.
            replaceable: whether something can stand in for a joined rank; None: joined ranks make
                the request by themselves.
            now: the time, in seconds.
        """
        if number in self._failed:
            return [(rank, self._failed[number])]
        key = key_of(name)
        asked = self._asked.setdefault(number, {}).setdefault(key, _Asked(name, now))
        asked.digests[rank] = digest
        asked.replaceable &= replaceable is not False
        asked.joined_take_part |= replaceable is None
        return self._look_at(number, key)

    def _look_at(self, number: int, key: str) -> Outgoing:
        ranks = self._ranks.get(number)
        asked = self._asked[number][key]
        if ranks is None:
            return []
        absent = [rank for rank in ranks if rank not in asked.digests]
        excused = () if asked.joined_take_part else self._joined
        if not set(absent) <= set(excused):
            gone = next((rank for rank in absent if rank in self._gone), None)
            return [] if gone is None else self._fail(number, *self._gone[gone])
        del self._asked[number][key]
        if len(set(asked.digests.values())) > 1:
            verdict = "differ"
        else:
            verdict = "go" if asked.replaceable or not absent else "refused"
        message: Message = ["go", number, key, verdict, absent]
        return [(rank, message) for rank in (ranks if verdict != "refused" else asked.digests)]

    def _look_again(self, numbers: Iterable[int]) -> Outgoing:
        out: Outgoing = []
        for number in list(numbers):
            for key in list(self._asked.get(number, ())):
                if key in self._asked.get(number, ()):  # it may have failed with another
                    out += self._look_at(number, key)
        return out

    # ---- failures ----

    def gone(self, rank: int, kind: str, text: str) -> Outgoing:
        """Records that ``rank`` has left; requests that need it fail with this error."""
        self._gone.setdefault(rank, (kind, text))
        return self._fail(0, kind, text) if self._joined else self._look_again(self._asked)

    def overdue(self, now: float) -> Outgoing:
        """Returns the messages that are due because of elapsed time."""
        out: Outgoing = []
        for number, requests in list(self._asked.items()):
            for key, asked in list(requests.items()):
                waited_s = now - asked.since
                lacking = self._lacking(number, asked)
                if waited_s >= self._timeout_s:
                    text = self._overdue_text(asked, lacking)
                    out += self._fail(number, "TransferTimeout", text)
                    break
                if waited_s >= self._warning_s and not asked.warned:
                    asked.warned = True
                    out += [(rank, ["late", number, key, lacking]) for rank in asked.digests]
        return out

    def _overdue_text(self, asked: _Asked, lacking: Sequence[int]) -> str:
        limit = f"{self._timeout_s:g} s (HVD_ORDER_TIMEOUT)"
        there = name_ranks(sorted(asked.digests))
        if asked.joined_take_part:
            return (
                f"{name_ranks(lacking)} did not come to {asked.name} within {limit} after {there} "
                "had come to it; every rank must make and train the same optimizers"
            )
        return (
            f"{asked.name} was not called on {name_ranks(lacking)} within {limit} after {there} "
            "had called it; every rank must call the same collectives, under the same names"
        )

    def deadline(self) -> float:
        """Returns the time at which `overdue` will next have messages; infinity: none so far."""
        return min(
            (
                asked.since + self._timeout_s if asked.warned else self.deadline_of_new(asked.since)
                for requests in self._asked.values()
                for asked in requests.values()
            ),
            default=math.inf,
        )

    def deadline_of_new(self, now: float) -> float:
        """Returns the deadline of a request made now."""
        return now + min(self._warning_s, self._timeout_s)

    def _lacking(self, number: int, asked: _Asked) -> list[int]:
        ranks = self._ranks.get(number, [0])  # rank 0 alone may not have a set yet
        excused = () if asked.joined_take_part else self._joined
        return [rank for rank in ranks if rank not in asked.digests and rank not in excused]

    def _fail(self, number: int, kind: str, text: str) -> Outgoing:
        asked = self._asked.pop(number, {})
        message: Message = ["failed", number, kind, text]
        self._failed[number] = message
        askers = {rank for request in asked.values() for rank in request.digests}
        return [(rank, message) for rank in {*self._ranks.get(number, ()), *askers}]

    # ---- join ----

    def join(
        self, rank: int, counts: dict[str, int], steps: list[Message], unnamed: dict[str, int]
    ) -> Outgoing:
        """Records that ``rank`` has joined.

        Args:
            rank: the rank.
            counts: number of steps of each exchange that the rank has observed (step_log.py).
            steps: its own latest steps; ranks that joined earlier may lack some of them.
            unnamed: number of unnamed requests that it has made, by process set.

        Raises:
            Malformed: it has joined already.
        """
        if rank in self._joined:
            raise malformed(rank, "it joins a second time")
        if self._gone:  # then not all ranks can join
            return self._fail(0, *next(iter(self._gone.values())))
        earlier = list(self._joined)
        self._joined.append(rank)
        out: Outgoing = [(other, step) for other in earlier for step in steps]
        out += [(rank, step) for step in self._steps]
        self._steps += steps
        for number, count in unnamed.items():
            self._unnamed[number] = max(count, self._unnamed.get(number, 0))
        out += self._look_again(self._asked)
        if len(self._joined) < self._size:
            active = [other for other in range(self._size) if other not in self._joined]
            return out + [(other, ["joined", rank, counts]) for other in active]
        end: Message = ["all_joined", rank, self._unnamed]
        out += [(other, end) for other in range(self._size)]
        self._joined, self._steps, self._unnamed = [], [], {}
        return out

    def step(self, step: Message) -> Outgoing:
        """Forwards a step of a training rank to the joined ranks."""
        return [(rank, step) for rank in self._joined]
