"""Ranks that agree on an order, with no thread and no clock: whoever is asked next acts next.

The world plays everything around ``Agreement``: training loops that make tensors ready, a network
that delivers messages between two ranks in order but whenever it likes, and collectives that end on
a rank at any time after all ranks have issued them. It keeps books of its own and checks each
decision against them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from helpers.property_cases import Choices

from hvd_order._core import Agreement, AgreementKind, Policy, SliceLayout

SliceKey = tuple[int, int]  # model, slice
TensorKey = tuple[int, int]  # model, tensor


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Args:
        models: tensors (name, bytes, buffer) by model id.
        slice_bytes: slice size.
        spare_credit: credit in bytes beyond the largest slice.
        size: how many ranks.
        steps: how often each tensor becomes ready on each rank.
        whole_steps: a model's tensors become ready again when all have been exchanged, as with a
            backward pass after a forward pass; else each for itself.
        late: ranks register their models at any time; else before anything happens.
    """

    models: dict[int, list[tuple[str, int, int]]]
    slice_bytes: int
    spare_credit: int
    size: int
    steps: int
    whole_steps: bool
    late: bool


class _Rank:
    """One rank and what the world knows about it."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.models_to_add: list[int] = []
        self.idle: list[TensorKey] = []  # may become ready now
        self.waiting: dict[int, list[TensorKey]] = {}  # for the rest of their model's step
        self.steps_left: dict[TensorKey, int] = {}
        self.slices_to_go: dict[TensorKey, int] = {}  # of tensors under way
        self.tensors_to_come: dict[SliceKey, int] = {}
        self.ready: set[SliceKey] = set()  # and not issued
        self.in_flight: set[SliceKey] = set()
        self.in_flight_bytes = 0
        self.times_ready: dict[SliceKey, int] = {}
        self.asked = False  # rank 0, to hear it or to do so no more
        self.reports = False
        self.finished: list[SliceKey] = []  # by the network, the rank has not been told
        self.issued = 0
        self.dirty = False  # news since it last decided


class World:
    """All ranks of one job; ``run`` plays it to the end."""

    def __init__(self, kind: AgreementKind, policy: Policy, work: Workload, chance: Choices):
        self.kind, self.policy, self.work, self.chance = kind, policy, work, chance
        self.layouts = {m: SliceLayout(t, work.slice_bytes) for m, t in work.models.items()}
        self.bytes: dict[SliceKey, int] = {}
        self.tensors_of: dict[SliceKey, list[TensorKey]] = {}
        self.slices_of: dict[TensorKey, list[SliceKey]] = {}
        for m, layout in self.layouts.items():
            for s, piece in enumerate(layout.slices):
                self.bytes[m, s] = piece.size_bytes
                self.tensors_of[m, s] = [(m, t) for t in layout.tensors_of(s)]
            for t in range(len(work.models[m])):
                self.slices_of[m, t] = [(m, s) for s in layout.slices_of(t)]
        self.credit = max(self.bytes.values()) + work.spare_credit
        self.plan = chance.shuffled(list(self.bytes)) if kind == AgreementKind.PLANNED else []

        self.order: list[SliceKey] = []  # in which slices were issued first
        self.issuers: list[int] = []  # for each entry of `order`: how many ranks have issued it
        self.mail: dict[tuple[int, int], deque[list[tuple[SliceKey, int]]]] = {}
        self.heard = set(range(1, work.size)) if kind == AgreementKind.NEGOTIATED else set()
        # What rank 0 knows: (rank, slice), how many times the slice has been ready there.
        self.known: dict[tuple[int, SliceKey], int] = {}
        self.eligible: list[SliceKey] = []  # what rank 0 may decide, in the order it came
        self.offered: dict[SliceKey, int] = {}  # how many times it was eligible

        self.ranks = [
            _Rank(Agreement(kind, r, work.size, policy, self.credit)) for r in range(work.size)
        ]
        for rank in self.ranks:
            rank.models_to_add = chance.shuffled(list(self.layouts))
            while not work.late and rank.models_to_add:
                self._add_model(rank)

    def run(self) -> None:
        """Plays until nothing can happen any more, then checks that nothing is left."""
        while events := self._possible():
            action, *arguments = self.chance.one_of(events)
            action(*arguments)
        steps, size = self.work.steps, self.work.size
        counts = {key: self.order.count(key) for key in self.bytes}
        assert counts == dict.fromkeys(self.bytes, steps), f"deadlock or loss: {counts}"
        assert self.issuers == [size] * len(self.order), "a rank did not issue everything"
        for number, rank in enumerate(self.ranks):
            assert not any(rank.steps_left.values()), f"rank {number} is not done"
            assert rank.agreement.in_flight_bytes == 0
            for m in self.layouts:
                rank.agreement.remove_model(m)  # raises unless the model is idle

    def _possible(self) -> list[tuple]:
        events: list[tuple] = []
        for rank in self.ranks:
            if rank.idle:
                events.append((self._make_ready, rank))
            if rank.dirty:
                events.append((self._decide, rank))
            if rank.finished:
                events.append((self._finish, rank))
            if rank.models_to_add:
                events.append((self._add_model, rank))
        events.extend((self._deliver, pair) for pair, letters in self.mail.items() if letters)
        return events

    # -------------------------------------------------------------------------- what can happen

    def _add_model(self, rank: _Rank) -> None:
        m = rank.models_to_add.pop()
        rank.agreement.add_model(m, self.layouts[m], [s for _, s in self.plan])
        for t in range(len(self.work.models[m])):
            rank.idle.append((m, t))
            rank.steps_left[m, t] = self.work.steps
        for s in range(len(self.layouts[m].slices)):
            rank.tensors_to_come[m, s] = len(self.tensors_of[m, s])
        rank.waiting[m] = []
        rank.dirty = True

    def _make_ready(self, rank: _Rank) -> None:
        tensor = rank.idle.pop(self.chance.below(len(rank.idle)))
        became = []
        rank.slices_to_go[tensor] = len(self.slices_of[tensor])
        for key in self.slices_of[tensor]:
            rank.tensors_to_come[key] -= 1
            if rank.tensors_to_come[key] == 0:
                became.append(key)
        assert rank.agreement.tensor_ready(*tensor) == became
        rank.ready.update(became)
        for key in became:
            rank.times_ready[key] = rank.times_ready.get(key, 0) + 1
        rank.dirty = True
        if rank is self.ranks[0]:
            self._offer(became)

    def _deliver(self, pair: tuple[int, int]) -> None:
        sender, receiver = pair
        letter = self.mail[pair].popleft()
        slices = [key for key, _ in letter]
        rank = self.ranks[receiver]
        rank.agreement.received(sender, slices)
        rank.dirty = True
        if receiver == 0:
            if not slices:
                self.heard ^= {sender}
                self.known = {k: times for k, times in self.known.items() if k[0] != sender}
                slices = sorted(self.bytes)
            elif sender in self.heard:
                self.known |= {(sender, key): times for key, times in letter}
            self._offer(slices)
        elif not slices:
            assert rank.asked, "an answer without a question"
            rank.asked = False
            rank.reports = not rank.reports

    def _decide(self, rank: _Rank) -> None:
        rank.dirty = False
        number = self.ranks.index(rank)
        in_flight_bytes = rank.in_flight_bytes
        issue, messages = rank.agreement.decide()
        for receiver, slices in messages:
            self._check_message(number, receiver, slices, issue)
            letter = [(key, rank.times_ready.get(key, 0)) for key in slices]
            self.mail.setdefault((number, receiver), deque()).append(letter)
        for key in issue:
            self._check_issue(number, rank, key)
            rank.ready.remove(key)
            rank.in_flight.add(key)
            rank.in_flight_bytes += self.bytes[key]
            assert rank.in_flight_bytes <= self.credit, f"rank {number} exceeds the credit"
            self.issuers[rank.issued] += 1
            if self.issuers[rank.issued] == self.work.size:
                for everyone in self.ranks:
                    everyone.finished.append(key)
            rank.issued += 1
        assert rank.agreement.in_flight_bytes == rank.in_flight_bytes
        follows = number > 0 or self.kind == AgreementKind.PLANNED
        if follows or in_flight_bytes <= self.credit // 2:  # rank 0 fills the window by halves
            self._check_no_idling(number, rank)

    def _finish(self, rank: _Rank) -> None:
        key = rank.finished.pop(self.chance.below(len(rank.finished)))
        rank.in_flight.remove(key)
        rank.in_flight_bytes -= self.bytes[key]
        rank.tensors_to_come[key] = len(self.tensors_of[key])
        complete = []
        for tensor in self.tensors_of[key]:
            rank.slices_to_go[tensor] -= 1
            if rank.slices_to_go[tensor] == 0:
                complete.append(tensor)
        assert rank.agreement.slice_done(*key) == complete
        rank.dirty = True
        for tensor in complete:
            rank.steps_left[tensor] -= 1
            m = tensor[0]
            rank.waiting[m].append(tensor)
            if not self.work.whole_steps or len(rank.waiting[m]) == len(self.work.models[m]):
                rank.idle.extend(t for t in rank.waiting[m] if rank.steps_left[t] > 0)
                rank.waiting[m].clear()

    # -------------------------------------------------------------------------- what must hold

    def _offer(self, slices: list[SliceKey]) -> None:
        """Rank 0 has learned something: which of these may it decide now that it could not before?

        What was eligible once stays so, although a rank is heard from then on.
        """
        for key in slices:
            times = self.ranks[0].times_ready.get(key, 0)
            if times > self.offered.get(key, 0) and all(
                self.known.get((rank, key), 0) >= times for rank in self.heard
            ):
                self.offered[key] = times
                self.eligible.append(key)

    def _urgency(self, key: SliceKey) -> tuple[int, int]:
        return key[1], key[0]

    def _head(self) -> SliceKey | None:
        """What rank 0 has to issue next."""
        if not self.eligible:
            return None
        if self.policy == Policy.ARRIVAL:
            return self.eligible[0]
        return min(self.eligible, key=self._urgency)

    def _planned(self, place: int) -> SliceKey:
        return self.plan[place % len(self.plan)]

    def _check_message(
        self, sender: int, receiver: int, slices: list[SliceKey], issue: list[SliceKey]
    ) -> None:
        assert self.kind != AgreementKind.PLANNED, "a plan needs no messages"
        assert (sender == 0) != (receiver == 0), "messages go along the star"
        rank = self.ranks[sender]
        if not slices:
            assert self.kind == AgreementKind.LEADER, "nobody has to ask"
            if sender > 0:
                assert not rank.asked, "asks twice"
                rank.asked = True
                if not rank.reports:
                    assert not issue
                    assert not rank.in_flight, "holds up nobody"
                    assert self.order[rank.issued] not in rank.ready, "holds up nobody"
        elif sender == 0:
            assert slices == issue, "rank 0 tells what it issues"
        else:
            assert rank.reports or self.kind == AgreementKind.NEGOTIATED, "nobody hears it"
            assert len(set(slices)) == len(slices)
            assert rank.ready.issuperset(slices), "reports what is not ready"

    def _check_issue(self, number: int, rank: _Rank, key: SliceKey) -> None:
        assert key in rank.ready, f"rank {number} issues {key}, which is not ready or issued twice"
        if rank.issued == len(self.order):
            assert number == 0 or self.kind == AgreementKind.PLANNED, "a follower runs ahead"
            self.order.append(key)
            self.issuers.append(0)
        assert self.order[rank.issued] == key, f"rank {number} leaves the order"
        if self.kind == AgreementKind.PLANNED:
            assert key == self._planned(rank.issued)
        elif number == 0:
            assert key == self._head(), f"{key} is not the most urgent"
            self.eligible.remove(key)
            if self.kind == AgreementKind.NEGOTIATED:
                for other in self.ranks:
                    assert key in other.ready, f"{key} is not ready everywhere"

    def _check_no_idling(self, number: int, rank: _Rank) -> None:
        """After a decision, what would come next is unknown, not ready or too large."""
        if self.kind == AgreementKind.PLANNED:
            following: SliceKey | None = self._planned(rank.issued)
        elif number == 0:
            following = self._head()
        elif rank.issued < len(self.order) - self._undelivered(number):
            following = self.order[rank.issued]
        else:
            following = None
        if following is not None and following in rank.ready:
            fits = rank.in_flight_bytes + self.bytes[following] <= self.credit
            assert not fits, f"rank {number} does not issue {following}"

    def _undelivered(self, number: int) -> int:
        return sum(map(len, self.mail.get((0, number), ())))
