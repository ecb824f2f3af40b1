"""What holds for the parts of every wait."""

from __future__ import annotations

from helpers.property_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.base.account.wait_split import WaitParts, split_wait

times = st.integers(-(10**15), 10**15)  # ns


def test_known_wait() -> None:
    # Gradients ready at 10, 13 and 10, transfer 2; a reader from 11 to 15.
    assert split_wait(11, 15, max(10, 13, 10), 13) == WaitParts(late=2, queue=0, transfer=2)
    # The same with a link that is busy until 14.
    assert split_wait(11, 16, 13, 14) == WaitParts(late=2, queue=1, transfer=2)


@cases(300)
@given(begin=times, end=times, ready=times, issued=times)
def test_parts_add_up_and_each_is_where_its_cause_is(
    begin: int, end: int, ready: int, issued: int
) -> None:
    parts = split_wait(begin, end, ready, issued)
    assert parts.exposed == max(0, end - begin)
    assert min(parts.late, parts.queue, parts.transfer) >= 0
    if parts.late:
        assert ready > begin
    if parts.queue:
        assert issued > max(ready, begin)
    if parts.transfer:
        assert end > max(ready, issued, begin)


@cases(300)
@given(begin=times, end=times, ready=times, issued=times, shift=times)
def test_parts_do_not_depend_on_the_clock(
    begin: int, end: int, ready: int, issued: int, shift: int
) -> None:
    there = split_wait(begin + shift, end + shift, ready + shift, issued + shift)
    assert there == split_wait(begin, end, ready, issued)


@cases(300)
@given(begin=times, end=times, ready=times, issued=times, sooner=st.integers(0, 10**15))
def test_a_rank_that_is_ready_sooner_is_blamed_less(
    begin: int, end: int, ready: int, issued: int, sooner: int
) -> None:
    assert split_wait(begin, end, ready - sooner, issued).late <= (
        split_wait(begin, end, ready, issued).late
    )
