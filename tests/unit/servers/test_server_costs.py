"""Times of a job with servers become bandwidth and costs: traces by hand, and what cannot be told.

Times of the traces are in milliseconds; sizes in MB.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.busy_union import LinkUse, ReceivedTimes, busy_ns, link_use
from hvd_order.planning.report.server_costs import NOT_APART, cost_text, lines_of
from hvd_order.servers.costs import (
    Cost,
    ServerCosts,
    ServerTimes,
    UpdateTimes,
    cost_of,
    server_costs,
)

MS = 1_000_000
MB = 1_000_000


def received(
    size: float,
    before: float,
    free: float,
    began: float,
    came: float,
    handled: float,
    thread: int = 1,
) -> ReceivedTimes:
    times = (round(t * MS) for t in (before, free, began, came, handled))
    return ReceivedTimes(round(size * MB), *times, thread)


# ---- the union ----


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20))))
def test_a_union_is_what_counting_moments_gives(pairs: list[tuple[int, int]]) -> None:
    intervals = [(begin, begin + length) for begin, length in pairs]
    moments = {moment for begin, end in intervals for moment in range(begin, end)}
    assert busy_ns(intervals) == len(moments)


# ---- the link ----


def test_idle_time_between_two_bursts_does_not_count() -> None:
    # The receiver waits for each header: 10 MB in 10 ms and, after a pause, in 10 ms.
    burst = [received(10, 5, 5, 100, 110, 111), received(10, 110, 111, 500, 510, 512)]
    use = link_use([burst], one_clock=True)
    assert use == LinkUse(2, 20 * MB, 0.02, pytest.approx(1e9), at_least=False)


def test_transfers_to_two_servers_at_once_share_the_link() -> None:
    one = [received(10, 5, 5, 100, 120, 121)]
    two = [received(10, 5, 5, 105, 120, 121)]
    assert link_use([one, two], one_clock=True).bytes_per_s == pytest.approx(20 * MB / 0.02)
    apart = link_use([one, two], one_clock=False)  # clocks of two hosts cannot be compared
    assert apart.bytes_per_s == pytest.approx(20 * MB / 0.035)
    assert apart.at_least


def test_a_receiver_slower_than_the_link_is_noticed() -> None:
    # 30 ms of work on each slice of 10 MB; behind the first, each is there when it is looked for.
    slow = [received(10, 0, 0, 100, 110, 140)]
    for i in range(1, 5):
        free = 110 + 30 * i
        slow.append(received(10, free - 30, free, free + 0.001, free + 0.002, free + 30))
    use = link_use([slow], one_clock=True)
    assert use.at_least
    # What is counted may include the receiver's work: 40 MB from 110 to 230 ms.
    assert use.bytes_per_s == pytest.approx(40 * MB / 0.120002, rel=1e-3)


def test_the_first_bytes_after_a_pause_may_be_faster_than_the_link() -> None:
    """A token bucket: after each pause 5 of 10 MB pass in no time, the others at 1 GB/s."""
    shaped = []
    for start in (100, 200, 300):
        for i in range(3):
            began, came = start + (10 * i - 5 if i else 0), start + 10 * i + 5
            shaped.append(received(10, began - 1, began - 0.5, began, came, came + 0.1))
    use = link_use([shaped], one_clock=True)
    assert use.bytes_per_s == pytest.approx(1e9)
    assert use.busy_s == pytest.approx(0.075)
    alone = [one for one in shaped if one.began_ns % (100 * MS) == 0]
    assert link_use([alone], one_clock=True).bytes_per_s == pytest.approx(2e9), "nothing follows"


def test_tiny_slices_tell_no_bandwidth() -> None:
    tiny = [received(0.001, 5 * i, 5 * i, 5 * i + 4, 5 * i + 4.001, 5 * i + 5) for i in range(9)]
    use = link_use([tiny], one_clock=True)
    assert use.bytes_per_s is None
    assert use.transfers == 9
    assert link_use([], one_clock=True).bytes_per_s is None


# ---- costs ----


def test_a_cost_by_slice_and_by_byte() -> None:
    """Both parts come back, whatever a loaded machine adds to a few of the samples."""
    draw = random.Random(1)
    samples = [(size, 20e-6 + size * 5e-10) for size in (MB // 4, MB, 4 * MB) for _ in range(40)]
    late = [(size, s + 0.05 * (draw.random() < 0.2)) for size, s in samples]
    cost = cost_of(late)
    assert cost.apart
    assert cost.seconds == pytest.approx(20e-6, rel=1e-6)
    assert cost.seconds_per_byte == pytest.approx(5e-10, rel=1e-6)
    assert cost_text(cost) == "2 GB/s and 20 us a slice"


def test_slices_of_one_size_cannot_tell_the_parts_apart() -> None:
    cost = cost_of([(MB, 1e-3)] * 9 + [(MB + 4096, 1.004096e-3)] * 9)
    assert not cost.apart
    assert (cost.seconds, cost.seconds_per_byte) == (0.0, pytest.approx(1e-9, rel=1e-3))
    assert cost_text(cost) == "1 GB/s"


def test_work_that_no_byte_costs() -> None:
    cost = cost_of([(size, 3e-6) for size in (1000, MB) for _ in range(9)])
    assert cost == Cost(pytest.approx(3e-6), 0.0, apart=True)
    assert cost_text(cost) == "3 us a slice"
    assert cost_text(cost_of([(1000, 0.0), (MB, -1e-9)])).endswith("us a slice")


def test_a_size_with_few_samples_does_not_bend_the_line() -> None:
    good = [(size, size * 1e-9) for size in (MB, 4 * MB) for _ in range(9)]
    assert cost_of([*good, (8 * MB, 1.0)]).seconds_per_byte == pytest.approx(1e-9)
    with pytest.raises(InvalidUsage, match="no work was recorded"):
        cost_of([])


def times(size: float = 1.0, count: int = 12, here: bool = True) -> ServerTimes:
    """Slices each 20 ms: pushed in 1 ms, updated in 2 ms, 0.1 ms beside that, answered in 1 ms."""
    pushes, updates, answers = [], [], []
    for i in range(count):
        at = 20.0 * i + 1
        scale = size if i % 2 else 4 * size
        pushes.append(received(scale, at - 1, at, at + 0.5, at + 0.5 + scale, at + 2.6 + scale, 7))
        begin = round((at + 0.55 + scale) * MS)
        updates.append(UpdateTimes(round(scale * MB), begin, begin + 2 * MS, 7))
        updates.append(UpdateTimes(round(scale * MB), begin, begin + 2 * MS, 8))  # other worker's
        answers.append(received(scale, at - 1, at, at + 5, at + 5 + scale, at + 5.3 + scale))
    return ServerTimes(pushes, updates, answers, here)


def test_the_update_is_no_part_of_the_servers_end() -> None:
    costs = server_costs([times()], 2, "async", "server")
    assert costs.update == Cost(pytest.approx(2e-3), 0.0, apart=True)
    assert costs.server_end.seconds == pytest.approx(1e-4)
    assert costs.worker_end.seconds == pytest.approx(3e-4)
    assert costs.link() == (pytest.approx(1e9), False)
    said = list(lines_of(costs))
    assert said[0] == "link, pushes: 8 Gbit/s (12 of 2.5e+03 kB)"
    assert said[2] == "server, update: 2 ms a slice"
    assert NOT_APART not in said
    assert NOT_APART in lines_of(replace(costs, update=Cost(0.0, 1e-9, apart=False)))


def test_pushes_to_two_hosts_are_not_put_on_one_clock() -> None:
    """At once by their clocks, which say nothing about each other: 1 GB/s each, not 2 together."""
    for elsewhere in (False, True):
        servers = [times(), times(here=not elsewhere)]
        use = server_costs(servers, 2, "async", "server").push
        assert use.bytes_per_s == pytest.approx(1e9 if elsewhere else 2e9)
        assert use.at_least == elsewhere


def test_the_link_is_told_by_the_direction_that_knows_it() -> None:
    sure, bound = LinkUse(1, MB, 1e-3, 1e9, False), LinkUse(1, MB, 1e-2, 1e8, True)
    nothing, cost = LinkUse(1, 10, 1e-3, None, False), Cost(0.0, 0.0, True)

    def link(push: LinkUse, answer: LinkUse) -> tuple[float, bool] | None:
        return ServerCosts(1, 1, "sync", "worker", push, answer, cost, cost, cost).link()

    assert link(sure, bound) == link(bound, sure) == link(nothing, sure) == (1e9, False)
    assert link(bound, nothing) == (1e8, True)
    assert link(bound, LinkUse(1, MB, 5e-3, 2e8, True)) == (2e8, True)
    assert link(nothing, nothing) is None
    for push, answer in itertools.permutations((sure, bound, nothing), 2):
        costs = ServerCosts(1, 1, "sync", "worker", push, answer, cost, cost, cost)
        text = "\n".join(lines_of(costs))
        assert ("at least" in text) == (bound in (push, answer))
        assert ("cannot be told" in text) == (nothing in (push, answer))


def test_a_job_without_transfers_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="no slice went to a server and back"):
        server_costs([ServerTimes([], [], [], True)], 1, "sync", "worker")
