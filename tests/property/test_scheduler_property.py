"""The scheduler alone, against a model of it in a few lines of Python."""

from __future__ import annotations

import pytest
from helpers.oracles.split_layouts import any_plan, is_gather, is_squares, waits_for
from helpers.property_cases import Choices, cases, choices, slice_sizes, tensor_specs
from hypothesis import given
from hypothesis import strategies as st

from hvd_order._native._core import Policy, Scheduler, SliceLayout

SliceKey = tuple[int, int]
TensorKey = tuple[int, int]
FORMS: list[dict[str, bool]] = [{}, {"split": True}, {"split": True, "sharded": True}]


class Model:
    """The same promises as the scheduler's, kept the slow way."""

    def __init__(self, policy: Policy, layouts: dict[int, SliceLayout], plan: list[int]) -> None:
        self.policy = policy
        self.plan = [(0, s) for s in plan]
        self.bytes = {  # of the credit
            (m, s): 0 if is_squares(layout, s) else piece.size_bytes
            for m, layout in layouts.items()
            for s, piece in enumerate(layout.slices)
        }
        self.carried = {(m, s): layouts[m].tensors_of(s) for m, s in self.bytes}
        self.before: dict[SliceKey, set[SliceKey]] = {  # to be done before the slice is ready
            (m, s): {(m, other) for other in needed}
            for m, layout in layouts.items()
            for s, needed in enumerate(waits_for(layout))
        }
        self.begun: set[tuple[SliceKey, int]] = set()  # (slice, tensor): that part is ready
        self.ended: set[tuple[SliceKey, SliceKey]] = set()  # (slice, one before): that is done
        self.offered: list[SliceKey] = []
        self.in_flight: list[SliceKey] = []
        self.issued: list[SliceKey] = []

    def slices_of(self, tensor: TensorKey) -> list[SliceKey]:
        return [k for k, ids in self.carried.items() if k[0] == tensor[0] and tensor[1] in ids]

    def ready(self, tensor: TensorKey) -> list[SliceKey]:
        slices = self.slices_of(tensor)
        self.begun.update((key, tensor[1]) for key in slices)
        return [key for key in slices if self.is_ready(key)]

    def is_ready(self, key: SliceKey) -> bool:
        return all((key, t) in self.begun for t in self.carried[key]) and all(
            (key, other) in self.ended for other in self.before[key]
        )

    def next(self, credit: int) -> SliceKey | None:
        candidate: SliceKey | None = None
        if self.policy == Policy.PLANNED:
            following = self.plan[len(self.issued) % len(self.plan)]
            candidate = following if following in self.offered else None
        elif self.offered:
            by_need = self.policy == Policy.PRIORITY
            candidate = min(self.offered, key=lambda k: k[::-1]) if by_need else self.offered[0]
        if candidate is None or self.used() + self.bytes[candidate] > credit:
            return None
        self.offered.remove(candidate)
        self.in_flight.append(candidate)
        self.issued.append(candidate)
        return candidate

    def done(self, key: SliceKey) -> tuple[list[TensorKey], set[SliceKey]]:
        """Returns the tensors that are complete and the slices that are ready now."""
        self.in_flight.remove(key)
        tensors = [(key[0], t) for t in self.carried[key]]
        self.begun.difference_update((key, t) for _, t in tensors)
        self.ended.difference_update((key, other) for other in self.before[key])
        later = [k for k, needed in self.before.items() if key in needed]
        self.ended.update((k, key) for k in later)
        complete = [
            t for t in tensors if not any((k, t[1]) in self.begun for k in self.slices_of(t))
        ]
        return complete, {k for k in later if self.is_ready(k)}

    def used(self) -> int:
        return sum(self.bytes[key] for key in self.in_flight)


def play(
    policy: Policy,
    layouts: dict[int, SliceLayout],
    spare_credit: int,
    steps: int,
    chance: Choices,
) -> None:
    """Random events until every tensor has been exchanged ``steps`` times."""
    credit = max(layout.largest_slice_bytes for layout in layouts.values()) + spare_credit
    scheduler = Scheduler(policy, credit)
    plan: list[int] = []
    if policy == Policy.PLANNED:
        plan = any_plan(layouts[0], chance)
    model = Model(policy, layouts, plan)
    for m, layout in layouts.items():
        scheduler.add_model(m, layout, plan)
    tensors = {(m, t) for m, s in model.bytes for t in layouts[m].tensors_of(s)}
    squares = {m: (m, layout.squares_tensor) for m, layout in layouts.items() if layout.is_split}
    # Of sharded models: a parameter becomes ready after the exchange of its gradient and the
    # squares, and the next gradient after the exchange of the parameter.
    after = {
        (m, t): (m, layout.parameter_of(t))
        for m, layout in layouts.items()
        if layout.is_sharded
        for t in range(layout.squares_tensor)
    }
    after |= {parameter: gradient for gradient, parameter in after.items()}
    left = dict.fromkeys(sorted(tensors), steps)  # tensor: how often it is still to be exchanged
    idle = {  # tensor: how often it is still to be ready
        (m, t): steps for m, t in left if not layouts[m].is_split or t <= squares[m][1]
    }
    under_way: dict[TensorKey, int] = {}
    waiting: list[TensorKey] = []  # exchanged, for the squares of the same step
    unoffered: list[SliceKey] = []

    def ready() -> None:
        tensor = chance.one_of(list(idle))
        under_way[tensor] = idle.pop(tensor) - 1
        became = scheduler.tensor_ready(*tensor)
        assert became == model.ready(tensor) == scheduler.became_ready()
        assert not any(is_gather(layouts[m], s) and not layouts[m].is_sharded for m, s in became)
        unoffered.extend(became)

    def offer() -> None:
        key = unoffered.pop(chance.below(len(unoffered)))
        scheduler.offer(*key)
        model.offered.append(key)

    def issue() -> None:
        key = scheduler.next()
        assert key == model.next(credit)
        assert scheduler.in_flight_bytes == model.used() <= credit

    def finish() -> None:
        key = chance.one_of(model.in_flight)
        complete = scheduler.slice_done(*key)
        became = scheduler.became_ready()
        assert (complete, set(became)) == model.done(key)
        assert len(became) <= 2
        unoffered.extend(became)
        for tensor in complete:
            left[tensor] = under_way.pop(tensor)
            waiting.append(tensor)
        for tensor in waiting[:]:
            # A step of a split model begins when the squares of the step before are done.
            if left[squares.get(tensor[0], tensor)] <= left[tensor]:
                waiting.remove(tensor)
                following = after.get(tensor, tensor)
                if left[following]:
                    idle[following] = left[following]

    news = False  # since `next` last returned nothing: every action makes progress, so this ends
    while True:
        actions = []
        if news:
            actions.append(issue)
        if idle:
            actions.append(ready)
        if unoffered:
            actions.append(offer)
        if model.in_flight:
            actions.append(finish)
        if not actions:
            break
        action = chance.one_of(actions)
        before = len(model.issued)
        action()
        news = action is not issue or len(model.issued) > before
        busy = {m for m, _ in under_way}
        assert all(scheduler.idle(m) == (m not in busy) for m in layouts)
    assert not model.offered, "deadlock"
    assert not under_way
    assert not waiting
    assert sorted(model.issued) == sorted(steps * list(model.bytes)), "lost or sent twice"
    for m in layouts:
        scheduler.remove_model(m)


@pytest.mark.parametrize("policy", [Policy.PRIORITY, Policy.ARRIVAL, Policy.PLANNED])
@cases(600, quick=150)
@given(
    tensors=tensor_specs(),
    slice_bytes=slice_sizes,
    form=st.sampled_from(FORMS),
    spare_credit=st.integers(0, 500),
    steps=st.integers(1, 3),
    chance=choices(),
)
def test_every_slice_goes_once_a_step_in_order_of_policy_within_the_credit(
    policy: Policy,
    tensors: list[tuple[str, int, int]],
    slice_bytes: int,
    form: dict[str, bool],
    spare_credit: int,
    steps: int,
    chance: Choices,
) -> None:
    play(policy, {0: SliceLayout(tensors, slice_bytes, **form)}, spare_credit, steps, chance)


@pytest.mark.parametrize("policy", [Policy.PRIORITY, Policy.ARRIVAL])
@cases(400, quick=100)
@given(
    first=tensor_specs(3),
    second=tensor_specs(3),
    slice_bytes=slice_sizes,
    forms=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)),
    spare_credit=st.integers(0, 500),
    steps=st.integers(1, 2),
    chance=choices(),
)
def test_two_models_share_the_credit(
    policy: Policy,
    first: list[tuple[str, int, int]],
    second: list[tuple[str, int, int]],
    slice_bytes: int,
    forms: tuple[dict[str, bool], dict[str, bool]],
    spare_credit: int,
    steps: int,
    chance: Choices,
) -> None:
    layouts = {
        0: SliceLayout(first, slice_bytes, **forms[0]),
        7: SliceLayout(second, slice_bytes, **forms[1]),
    }
    play(policy, layouts, spare_credit, steps, chance)
