"""Ranks that agree on an order, with no thread and no clock: whoever is asked next acts next.

The world plays everything around ``Agreement``: training loops that make tensors ready, a network
that delivers messages between two ranks in order but whenever it likes, and collectives that end on
a rank at any time after all ranks have issued them. It keeps books of its own and checks each
decision against them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from helpers.oracles.split_layouts import any_plan, is_gather, is_squares, waits_for
from helpers.property_cases import Choices

from hvd_order._native._core import Agreement, AgreementKind, Policy, SliceLayout

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
        fan_out: how many children a rank may have in the tree of ranks.
        split: ids of the models whose all-reduces are split.
    """

    models: dict[int, list[tuple[str, int, int]]]
    slice_bytes: int
    spare_credit: int
    size: int
    steps: int
    whole_steps: bool
    late: bool
    fan_out: int = 4
    split: frozenset[int] = frozenset()


class _Rank:
    """One rank and what the world knows about it."""

    def __init__(self, agreement: Agreement, parent: int, children: range, heard: set[int]) -> None:
        self.agreement = agreement
        self.parent, self.children, self.heard = parent, children, heard
        # What it knows: (child, slice), how many times the slice has been ready in that subtree.
        self.known: dict[tuple[int, SliceKey], int] = {}
        self.complete: dict[SliceKey, int] = {}  # how many times there and on all that it hears
        self.reported: dict[SliceKey, int] = {}  # to its parent, or decided before it was heard
        self.decided: dict[SliceKey, int] = {}  # how many times it has been told to issue the slice
        self.models_to_add: list[int] = []
        self.idle: list[TensorKey] = []  # may become ready now
        self.waiting: dict[int, list[TensorKey]] = {}  # for the rest of their model's step
        self.steps_left: dict[TensorKey, int] = {}
        self.slices_to_go: dict[TensorKey, int] = {}  # of tensors under way
        self.to_come: dict[SliceKey, int] = {}  # how many tensors and slices it waits for
        self.ready: set[SliceKey] = set()  # and not issued
        self.in_flight: set[SliceKey] = set()
        self.in_flight_bytes = 0
        self.times_ready: dict[SliceKey, int] = {}
        self.told: dict[int, int] = {}  # by child: how many decisions it has been sent
        self.asked = False  # its parent, to hear it or to do so no more
        self.reports = False  # its parent hears it
        self.finished: list[SliceKey] = []  # by the network, the rank has not been told
        self.issued = 0
        self.decisions = 0  # so many, of all slices
        self.dirty = False  # news since it last decided


class World:
    """All ranks of one job; ``run`` plays it to the end."""

    def __init__(
        self,
        kind: AgreementKind,
        policy: Policy,
        work: Workload,
        chance: Choices,
        plan: list[int] | None = None,
    ) -> None:
        """Makes all ranks.

        Args:
            plan: for a planned agreement, the order of the slices of model 0; None: any.
        """
        self.kind, self.policy, self.work, self.chance = kind, policy, work, chance
        self.layouts = {
            m: SliceLayout(t, work.slice_bytes, split=m in work.split)
            for m, t in work.models.items()
        }
        self.bytes: dict[SliceKey, int] = {}  # of the credit
        self.tensors_of: dict[SliceKey, list[TensorKey]] = {}
        self.slices_of: dict[TensorKey, list[SliceKey]] = {}
        self.tensors: dict[int, list[TensorKey]] = {}  # by model; the squares are the last
        self.squares: dict[int, TensorKey] = {}  # of the models that are split
        self.waits_for: dict[SliceKey, set[SliceKey]] = {}
        self.gathers: set[SliceKey] = set()
        for m, layout in self.layouts.items():
            for s, (piece, before) in enumerate(zip(layout.slices, waits_for(layout), strict=True)):
                self.bytes[m, s] = 0 if is_squares(layout, s) else piece.size_bytes
                self.tensors_of[m, s] = [(m, t) for t in layout.tensors_of(s)]
                self.waits_for[m, s] = {(m, other) for other in before}
                if is_gather(layout, s):
                    self.gathers.add((m, s))
            self.tensors[m] = [(m, t) for t in range(len(work.models[m]))]
            if layout.is_split:
                self.squares[m] = (m, layout.squares_tensor)
                self.tensors[m].append(self.squares[m])
            for _, t in self.tensors[m]:
                self.slices_of[m, t] = [(m, s) for s in layout.slices_of(t)]
        # The all-gather comes before the squares.
        self.released_by = {
            key: sorted((k for k, before in self.waits_for.items() if key in before), reverse=True)
            for key in self.bytes
        }
        self.credit = max(self.bytes.values()) + work.spare_credit
        self.plan: list[SliceKey] = []
        if kind == AgreementKind.PLANNED:
            order = any_plan(self.layouts[0], chance) if plan is None else plan
            self.plan = [(0, s) for s in order]

        self.order: list[SliceKey] = []  # in which slices were issued first
        self.issuers: list[int] = []  # for each entry of `order`: how many ranks have issued it
        self.mail: dict[tuple[int, int], deque[list[tuple[SliceKey, int]]]] = {}
        self.eligible: list[SliceKey] = []  # what rank 0 may decide, in the order it came
        self.ever_heard: set[int] = set()

        self.ranks = [self._new_rank(number) for number in range(work.size)]
        for rank in self.ranks:
            rank.models_to_add = chance.shuffled(list(self.layouts))
            while not work.late and rank.models_to_add:
                self._add_model(rank)

    def _new_rank(self, number: int) -> _Rank:
        work = self.work
        agreement = Agreement(
            self.kind, number, work.size, self.policy, self.credit, fan_out=work.fan_out
        )
        first = number * work.fan_out + 1
        children = range(min(first, work.size), min(first + work.fan_out, work.size))
        heard = set(children) if self.kind == AgreementKind.NEGOTIATED else set()
        rank = _Rank(agreement, (number - 1) // work.fan_out, children, heard)
        rank.reports = self.kind == AgreementKind.NEGOTIATED and number > 0
        return rank

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
        for tensor in self.tensors[m]:
            rank.idle.append(tensor)
            rank.steps_left[tensor] = self.work.steps
        for s in range(len(self.layouts[m].slices)):
            rank.to_come[m, s] = self._awaited(m, s)
        rank.waiting[m] = []
        rank.dirty = True

    def _awaited(self, m: int, s: int) -> int:
        """How many tensors and slices a slice waits for in each step."""
        key = (m, s)
        tensors = 0 if key in self.gathers else len(self.tensors_of[key])
        return tensors + len(self.waits_for[key])

    def _count(self, rank: _Rank, keys: list[SliceKey]) -> list[SliceKey]:
        """Something that these slices wait for has happened. Returns those that are ready now."""
        became = []
        for key in keys:
            rank.to_come[key] -= 1
            if rank.to_come[key] == 0:
                became.append(key)
        rank.ready.update(became)
        for key in became:
            rank.times_ready[key] = rank.times_ready.get(key, 0) + 1
        return became

    def _make_ready(self, rank: _Rank) -> None:
        tensor = rank.idle.pop(self.chance.below(len(rank.idle)))
        rank.slices_to_go[tensor] = len(self.slices_of[tensor])
        became = self._count(
            rank, [key for key in self.slices_of[tensor] if key not in self.gathers]
        )
        assert rank.agreement.tensor_ready(*tensor) == became
        rank.dirty = True
        self._completed(rank, became)

    def _deliver(self, pair: tuple[int, int]) -> None:
        sender, receiver = pair
        letter = self.mail[pair].popleft()
        slices = [key for key, _ in letter]
        rank = self.ranks[receiver]
        rank.agreement.received(sender, slices)
        rank.dirty = True
        if sender in rank.children:
            if not slices:
                rank.heard ^= {sender}
                self.ever_heard.add(sender)
                slices = sorted(self.bytes)
                rank.known |= {(sender, key): rank.decided.get(key, 0) for key in slices}
            elif sender in rank.heard:
                rank.known |= {(sender, key): times for key, times in letter}
            self._completed(rank, slices)
        elif not slices:
            assert rank.asked, "an answer without a question"
            rank.asked = False
            rank.reports = not rank.reports
            if rank.reports:  # from the next decision on; nobody has been told what is complete
                rank.complete, rank.reported = dict(rank.decided), dict(rank.decided)
                self._completed(rank, sorted(self.bytes))
        else:
            self._decided(rank, slices)

    def _decided(self, rank: _Rank, slices: list[SliceKey]) -> None:
        rank.decisions += len(slices)
        for key in slices:
            rank.decided[key] = rank.decided.get(key, 0) + 1

    def _decide(self, rank: _Rank) -> None:
        rank.dirty = False
        number = self.ranks.index(rank)
        in_flight_bytes = rank.in_flight_bytes
        issue, messages = rank.agreement.decide()
        for receiver, slices in messages:
            self._check_message(number, receiver, slices, issue)
            letter = [(key, rank.reported.get(key, 0)) for key in slices]
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
        if number == 0:
            self._decided(rank, issue)
        elif rank.reports:
            assert rank.reported == rank.complete, f"rank {number} owes reports"
        follows = number > 0 or self.kind == AgreementKind.PLANNED
        if follows or in_flight_bytes <= self.credit // 2:  # rank 0 fills the window by halves
            self._check_no_idling(number, rank)

    def _finish(self, rank: _Rank) -> None:
        key = rank.finished.pop(self.chance.below(len(rank.finished)))
        rank.in_flight.remove(key)
        rank.in_flight_bytes -= self.bytes[key]
        rank.to_come[key] = self._awaited(*key)
        became = self._count(rank, self.released_by[key])
        complete = []
        for tensor in self.tensors_of[key]:
            rank.slices_to_go[tensor] -= 1
            if rank.slices_to_go[tensor] == 0:
                complete.append(tensor)
        assert rank.agreement.slice_done(*key) == complete
        rank.dirty = True
        self._completed(rank, became)
        m = key[0]
        for tensor in complete:
            rank.steps_left[tensor] -= 1
            rank.waiting[m].append(tensor)
        begin = [tensor for tensor in rank.waiting[m] if self._may_begin(rank, tensor)]
        rank.waiting[m] = [tensor for tensor in rank.waiting[m] if tensor not in begin]
        rank.idle.extend(tensor for tensor in begin if rank.steps_left[tensor] > 0)

    def _may_begin(self, rank: _Rank, tensor: TensorKey) -> bool:
        """Whether the tensor, which has been exchanged, may become ready for the next step."""
        m = tensor[0]
        if self.work.whole_steps:
            return len(rank.waiting[m]) == len(self.tensors[m])
        # A step of a split model begins when the squares of the step before are done.
        squares = self.squares.get(m, tensor)
        return rank.steps_left[squares] <= rank.steps_left[tensor]

    # -------------------------------------------------------------------------- what must hold

    def _completed(self, rank: _Rank, slices: list[SliceKey]) -> None:
        """A rank has learned something: which of these are now ready on all ranks that it hears?

        What was complete once stays so, although a child is heard from then on. Rank 0 may decide
        what is complete there.
        """
        for key in slices:
            known = [rank.known.get((child, key), 0) for child in rank.heard]
            times = min([rank.times_ready.get(key, 0), *known])
            if times > rank.complete.get(key, 0):
                rank.complete[key] = times
                if rank is self.ranks[0]:
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
        rank = self.ranks[sender]
        if receiver in rank.children:
            told = rank.told.get(receiver, 0)
            rank.told[receiver] = told + len(slices)
            if sender == 0:
                assert not slices or slices == issue, "rank 0 tells what it issues"
            else:
                assert rank.told[receiver] <= rank.decisions, "decides by itself"
                assert slices == self.order[told : rank.told[receiver]], "passes on another order"
            assert slices or self.kind == AgreementKind.LEADER, "nobody has to ask"
            return
        assert sender > 0
        assert receiver == rank.parent, "messages go along the tree"
        if slices:
            assert rank.reports, "nobody hears it"
            for key in slices:
                rank.reported[key] = rank.reported.get(key, 0) + 1
            early = [key for key in slices if rank.reported[key] > rank.complete.get(key, 0)]
            assert not early, f"rank {sender} reports what is not ready: {early}"
            return
        assert self.kind == AgreementKind.LEADER, "nobody has to ask"
        assert not rank.asked, "asks twice"
        rank.asked = True
        if rank.reports:
            assert not rank.heard, "its children are heard no more"
        elif not rank.heard:
            assert not issue
            assert not rank.in_flight, "holds up nobody"
            assert self.order[rank.issued] not in rank.ready, "holds up nobody"

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
        elif rank.issued < rank.decisions:
            following = self.order[rank.issued]
        else:
            following = None
        if following is not None and following in rank.ready:
            fits = rank.in_flight_bytes + self.bytes[following] <= self.credit
            assert not fits, f"rank {number} does not issue {following}"
