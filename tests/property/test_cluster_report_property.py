"""Pictures of clusters: bars of a machine do not overlap, and use adds up."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.report.lanes import boxes_of
from hvd_order.cluster.report.occupancy import Bar, read_occupancy, span_of

CAPACITY = 8.0


@st.composite
def schedules(draw: st.DrawFn) -> list[Bar]:
    """Bars that never take more than the machines have."""
    free = np.full((2, 24), CAPACITY)
    bars = []
    for number in range(draw(st.integers(0, 25))):
        machine, begin = draw(st.integers(0, 1)), draw(st.integers(0, 22))
        end = draw(st.integers(begin + 1, 23))
        amount = draw(st.sampled_from([0.5, 1.0, 2.0, 3.0, 8.0]))
        if (free[machine, begin:end] >= amount).all():
            free[machine, begin:end] -= amount
            bars.append(Bar(machine, f"j{number}", float(begin), float(end), amount))
    return bars


@given(schedules())
def test_bars_have_their_amount_and_share_no_place(bars: list[Bar]) -> None:
    boxes = boxes_of(bars, [CAPACITY, CAPACITY])
    for bar in bars:
        assert sum(b.high - b.low for b in boxes if b.bar is bar) == pytest.approx(bar.amount)
    for i, one in enumerate(boxes):
        assert 0 <= one.low < one.high <= CAPACITY
        for other in boxes[:i]:
            apart = (
                one.bar.machine != other.bar.machine
                or one.bar.end_s <= other.bar.begin_s
                or other.bar.end_s <= one.bar.begin_s
                or one.high <= other.low + 1e-9
                or other.high <= one.low + 1e-9
            )
            assert apart


@given(schedules())
def test_use_over_time_adds_up_to_the_bars(bars: list[Bar]) -> None:
    machines = Machines.alike(2, {"cpu": 16.0, "gpu": CAPACITY})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "placements.csv")
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("job", "machine", "begin_s", "end_s", "workers", "servers", "cpu",
                           "gpu"))  # fmt: skip
            for bar in bars:
                rows.writerow([bar.job, f"m{bar.machine}", bar.begin_s, bar.end_s, 1, 0,
                               2 * bar.amount, bar.amount])  # fmt: skip
        span = span_of([path])
        found = read_occupancy(path, machines, span)
    assert found.bars == bars
    column_s = (span[1] - span[0]) / found.shares.shape[1]
    for machine in (0, 1):
        used = sum(b.amount * (b.end_s - b.begin_s) for b in bars if b.machine == machine)
        assert found.shares[machine].sum() * column_s * CAPACITY == pytest.approx(used, abs=1e-6)
    assert found.shares.min(initial=0) > -1e-9
    assert found.shares.max(initial=0) < 1 + 1e-9
    both = sum(b.amount * (b.end_s - b.begin_s) for b in bars)
    assert found.use["gpu"].sum() * column_s * 2 * CAPACITY == pytest.approx(both, abs=1e-6)
    assert found.use["cpu"].sum() * column_s * 32 == pytest.approx(2 * both, abs=1e-6)
