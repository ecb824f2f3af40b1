"""The choice of what travels in fewer bits, beside all choices."""

from __future__ import annotations

from itertools import combinations

from helpers.property_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.base.link.code_choice import TimedGradient, choose_coded, step_bound_s

times = st.integers(0, 20).map(float)


@st.composite
def gradient(draw: st.DrawFn) -> TimedGradient:
    wire_s = draw(times)
    coded_s = draw(st.sampled_from([None, wire_s / 4, wire_s / 2, 0.0]))
    return TimedGradient(draw(times), wire_s, coded_s, draw(st.sampled_from([1.0, 1.0, 0.1, 3.0])))


@given(gradients=st.lists(gradient(), max_size=8), compute_s=st.integers(1, 30).map(float))
@cases(600, quick=150)
def test_no_other_choice_is_clearly_shorter_and_nothing_is_taken_in_vain(
    gradients: list[TimedGradient], compute_s: float
) -> None:
    chosen = choose_coded(compute_s, gradients)
    every = range(len(gradients))
    shortest = min(
        step_bound_s(compute_s, gradients, some)
        for count in range(len(gradients) + 1)
        for some in combinations(every, count)
    )
    bound = step_bound_s(compute_s, gradients, chosen)
    assert bound <= max(shortest, 1.005 * compute_s) * (1 + 1e-12)
    for place in chosen:
        assert gradients[place].coded_s is not None
        others = [each for each in chosen if each != place]
        needed = step_bound_s(compute_s, gradients, others)
        assert needed > max(bound, 1.005 * compute_s)


def test_the_vector_of_three_layers() -> None:
    """Link of 1 byte a second, forward and backward 1 s for each layer, bytes 6, 1, 1."""

    def layers(first_coded: float, *others: float | None) -> list[TimedGradient]:
        coded = [first_coded, *(others or (None, None))]
        return [
            TimedGradient(work, wire, fewer)
            for work, wire, fewer in zip((6.0, 4.0, 2.0), (6.0, 1.0, 1.0), coded, strict=True)
        ]

    assert step_bound_s(6.0, layers(3.0)) == 12
    assert step_bound_s(6.0, layers(3.0), {0}) == 9
    assert step_bound_s(6.0, layers(1.0), {0}) == 7
    assert step_bound_s(6.0, layers(6.0, 0.0, 0.0), {1, 2}) == 12
    assert choose_coded(6.0, layers(3.0, 0.0, 0.0)) == [0]


def test_a_link_that_is_hidden_needs_nothing() -> None:
    assert choose_coded(10.0, [TimedGradient(9.0, 1.0, 0.25), TimedGradient(3.0, 5.0, 1.0)]) == []


def test_the_smaller_error_is_taken_of_two_that_save_alike() -> None:
    alike = [TimedGradient(6.0, 4.0, 1.0, error=0.02), TimedGradient(6.0, 4.0, 1.0, error=0.01)]
    assert choose_coded(11.5, alike) == [1]
