"""Clocks and parts of all ranks come to rank 0.

The messages are those of the star (negotiation.py), which one thread of each rank takes: a rank
answers while its program computes, waits, or has not called ``stop_timeline()``, so no rank waits
for the program of another. "clock" asks a rank for its time, several times in a row, when rank 0's
recording begins and when it ends. "trace" asks for its part; a rank that ends its recording sends
its part unasked.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_order.base.account.clock_offset import ClockOffset, Passage, clock_offset
from hvd_order.engine.job.message_forms import Message
from hvd_order.engine.tracing.merge import RankPart

__all__: list[str] = []

_ROUNDS = 16  # questions for the time; the quickest answer decides the error
_CLOCK_S = 2.0  # longest wait for all of them: threads answer that have nothing else to do
_OWN_END_S = 1.0  # for a rank to come to its own stop_timeline()
_SILENCE_S = 10.0  # without a piece of any part
_PIECE = 48 * 1024  # characters of a message, so that others come between
_MOST_BYTES = 1 << 31  # of a part; more is no part

Send = Callable[[int, Message], None]


def pieces(part: RankPart) -> list[Message]:
    """Returns the messages that carry a part."""
    packed = zlib.compress(json.dumps(part, separators=(",", ":")).encode(), 1)
    text = base64.b64encode(packed).decode()
    cut = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    return [["trace", number, len(cut), piece] for number, piece in enumerate(cut)]


def joined(texts: Iterable[str]) -> RankPart | None:
    """Returns the part in the pieces' texts; None: it is none."""
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode("".join(texts), validate=True), _MOST_BYTES)
        part: Any = json.loads(data)
    except (binascii.Error, zlib.error, ValueError, RecursionError):
        return None
    events = part.get("events") if isinstance(part, dict) else None
    if not isinstance(events, list) or not all(isinstance(each, dict) for each in events):
        return None
    return RankPart(events=events)


@dataclass
class _TracedPeer:
    """Another rank, as rank 0 knows it."""

    asked_ns: int = 0
    answers_due: int = 0
    mine: list[Passage] = field(default_factory=list)  # of this question for clocks
    of_rank_0: list[Passage] = field(default_factory=list)
    offsets: list[ClockOffset] = field(default_factory=list)
    records: bool = False
    texts: list[str] = field(default_factory=list)
    is_complete: bool = False


class Gathering:
    """Rank 0's side of one recording.

    Thread safety: all methods may be called from any thread; `collect` alone waits.
    """

    def __init__(self, size: int, send: Send) -> None:
        """Asks nothing yet.

        Args:
            size: ranks of the job.
            send: sends a message to a rank.
        """
        self._send = send
        self._peers = {rank: _TracedPeer() for rank in range(1, size)}
        self._gone: set[int] = set()
        self._changed = threading.Condition()

    def ask_clocks(self) -> None:
        """Asks for the clocks of all ranks; does not wait."""
        with self._changed:
            for rank, peer in self._peers.items():
                peer.mine, peer.of_rank_0, peer.answers_due = [], [], _ROUNDS
                self._ask(rank, peer)

    def _ask(self, rank: int, peer: _TracedPeer) -> None:
        peer.asked_ns = time.monotonic_ns()
        self._send(rank, ["clock"])

    def heard(self, sender: int, message: Message) -> None:
        """Takes a message of another rank."""
        now_ns = time.monotonic_ns()
        kind, *rest = message
        with self._changed:
            peer = self._peers[sender]
            if kind == "clock":
                self._take_clock(sender, peer, now_ns, *rest)
            else:
                number, count, text = rest
                if number != len(peer.texts) or peer.is_complete:
                    return  # of a part that began before this recording, or a second one
                peer.texts.append(text)
                peer.is_complete = number + 1 >= count
            self._changed.notify_all()

    def _take_clock(
        self, rank: int, peer: _TracedPeer, now_ns: int, its_ns: int, records: bool | None
    ) -> None:
        peer.records = bool(records)
        if not peer.answers_due:
            return
        # The question left before the answer was written, and the answer came after that.
        peer.mine.append((its_ns, its_ns))
        peer.of_rank_0.append((peer.asked_ns, now_ns))
        peer.answers_due -= 1
        if peer.answers_due:
            self._ask(rank, peer)
        else:
            peer.offsets.append(clock_offset(peer.mine, peer.of_rank_0))

    def lost(self, rank: int) -> None:
        """Takes note of a rank from which nothing follows."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def collect(self) -> Gathered:
        """Ends the recording on all ranks and returns their parts, as far as they come.

        Waits some seconds at most after the last message.
        """
        self.ask_clocks()
        with self._changed:
            self._wait(lambda peer: not peer.answers_due, _CLOCK_S)
            # Most programs stop the recording on all ranks; then none loses its last events.
            self._wait(_has_sent, _OWN_END_S)
            for rank, peer in self._peers.items():
                if not _has_sent(peer) and rank not in self._gone:
                    self._send(rank, ["trace", self._now_there_ns(peer)])
            had = -1
            while had < (has := sum(len(peer.texts) for peer in self._peers.values())):
                had = has
                self._wait(_has_sent, _SILENCE_S, or_piece=True)
            return self._gathered()

    def _now_there_ns(self, peer: _TracedPeer) -> int:
        offset = peer.offsets[-1].high_ns if peer.offsets else 0.0
        return max(0, int(time.monotonic_ns() + offset))

    def _wait(
        self, done: Callable[[_TracedPeer], bool], for_s: float, or_piece: bool = False
    ) -> None:
        """Waits until all ranks that are there are done; or, if so asked, for the next piece."""

        def pieces_had() -> int:
            return sum(len(peer.texts) for peer in self._peers.values())

        had = pieces_had()
        self._changed.wait_for(
            lambda: (
                all(done(peer) or rank in self._gone for rank, peer in self._peers.items())
                or (or_piece and pieces_had() > had)
            ),
            for_s,
        )

    def _gathered(self) -> Gathered:
        result = Gathered()
        for rank, peer in self._peers.items():
            part = joined(peer.texts) if peer.is_complete else None
            if part is None:
                cause = "does not record"
                if rank in self._gone:
                    cause = "is gone"
                elif peer.is_complete:
                    cause = "sent what is no part of a trace"
                elif peer.records or not peer.offsets:
                    cause = "did not answer"
                result.missing[cause].append(rank)
            else:
                result.parts[rank] = part
                result.clocks[rank] = peer.offsets
        return result


def _has_sent(peer: _TracedPeer) -> bool:
    return peer.is_complete or not peer.records


@dataclass
class Gathered:
    """What has come of the other ranks.

    Attributes:
        parts: by rank.
        clocks: offsets at the begin and the end of the recording, as far as they are known.
        missing: ranks without a part, by cause: what follows "rank 1".
    """

    parts: dict[int, RankPart] = field(default_factory=dict)
    clocks: dict[int, list[ClockOffset]] = field(default_factory=dict)
    missing: Mapping[str, list[int]] = field(default_factory=lambda: defaultdict(list))
