"""Roll call: finds the rank to blame when ranks wait for each other in vain.

A separate thread of each rank answers, even while the program is busy, so only a process that is
stopped, or whose host is cut off, gives no answer. An answer counts the common steps of each kind
that its rank has started; a rank with a lower count is late. Rank 0 forwards questions and
answers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvd_order.base.same_model import name_ranks
from hvd_order.engine.job.message_forms import Message

__all__ = ["RollCall", "RollCallResult"]

_PATIENCE_S = 3.0  # a thread answers in milliseconds, or some hundred on a loaded host


@dataclass(frozen=True)
class RollCallResult:
    """Result of a roll call.

    Attributes:
        gone: ranks that have left or died.
        silent: ranks that gave no answer and are not known to be gone; only rank 0 if it is
            silent, since it would have forwarded the other answers.
        late: ranks that are alive and have started fewer steps.
    """

    gone: list[int]
    silent: list[int]
    late: list[int]

    def text(self) -> str:
        """Returns one clause that names the ranks."""
        parts = []
        if self.gone:
            parts.append(f"{name_ranks(self.gone)} died or left")
        if self.silent:
            parts.append(
                f"no answer from {name_ranks(self.silent)}: the process is stopped, or its host "
                "cannot be reached"
            )
        if self.late:
            parts.append(f"{name_ranks(self.late)} did not come to it")
        return "; ".join(parts) or (
            "every rank answers, so a connection between two of them is broken or stuck"
        )


class RollCall:
    """One rank's part in roll calls.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(self, rank: int, size: int, send: Callable[[int, Message], None]) -> None:
        """Prepares; ``send`` posts a message to a rank, on ranks other than 0 to rank 0 alone."""
        self._rank = rank
        self._size = size
        self._send = send
        self._changed = threading.Condition()  # guards the fields below
        self._came: Counter[str] = Counter()
        self._gone: set[int] = set()
        self._number = 0
        self._answers: dict[int, Mapping[str, int]] = {}
        self._asked: dict[int, int] = {}  # on rank 0, by rank: the number of its last question

    def come_to(self, what: str) -> None:
        """Counts one more common step of this kind on this rank."""
        with self._changed:
            self._came[what] += 1

    def gone(self, rank: int) -> None:
        """Records that a rank has left or died."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()
            # Rank 0 may learn of it only after it has answered.
            late = [(to, self._answer(to, number)) for to, number in self._asked.items()]
        for asker, answer in late:
            self._send(asker, answer)

    def _answer(self, asker: int, number: int) -> Message:
        return ["here", asker, number, self._rank, dict(self._came), sorted(self._gone)]

    def call(self, what: str, ranks: Sequence[int]) -> RollCallResult:
        """Asks all ranks; takes some seconds if one does not answer.

        Args:
            what: the kind of common step that does not end.
            ranks: ranks that take part in it; the result leaves out all other ranks except rank 0.
        """
        with self._changed:
            self._number += 1
            self._answers = {self._rank: dict(self._came)}
            question: Message = ["roll", self._rank, self._number]
        for rank in range(1, self._size) if self._rank == 0 else (0,):
            self._send(rank, question)
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._answers.keys() | self._gone) == self._size or 0 in self._gone,
                _PATIENCE_S,
            )
            answered, gone = dict(self._answers), sorted(self._gone)
        silent = [rank for rank in ranks if rank not in answered and rank not in gone]
        if 0 not in answered:  # rank 0 would have forwarded the other answers
            silent = [] if 0 in gone else [0]
        mine = answered[self._rank].get(what, 0)
        late = [rank for rank in ranks if answered.get(rank, {}).get(what, mine) < mine]
        return RollCallResult([rank for rank in gone if rank in ranks or rank == 0], silent, late)

    def received(self, message: Message) -> None:
        """Handles a question or an answer: ``["roll", ...]`` or ``["here", ...]``."""
        what, asker, number, *rest = message
        if what == "roll":
            with self._changed:
                answer = self._answer(asker, number)
                if self._rank == 0:
                    self._asked[asker] = number
            self._send(asker if self._rank == 0 else 0, answer)
            if self._rank == 0:
                for rank in range(1, self._size):
                    if rank != asker:
                        self._send(rank, message)
        elif asker == self._rank:
            rank, came, gone = rest
            with self._changed:
                if number == self._number:
                    self._answers[rank] = came
                    self._gone.update(gone)
                    self._changed.notify_all()
        elif self._rank == 0:
            self._send(asker, message)
