"""hvd-order cluster run --links: jobs that share links, worked out by hand."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cluster_runs import Called, rows_of

# Two machines whose links carry 1 GB/s each way. No machine holds both workers of the first job,
# nor what is left of one those of the second: both jobs send over both links, 1 byte a byte.
MACHINES = "2xgpu:2,cpu:4,bandwidth_gbit:8"
HEAD = "name,arrival_s,workers,duration_s,worker,compute_s,gradient_mb\n"


@pytest.fixture
def ends(tmp_path: Path, call: Callable[..., Called]) -> Callable[..., dict[str, list[float]]]:
    """Ends of jobs by the name of the run."""

    def simulated(jobs: str, *orders: str) -> dict[str, list[float]]:
        trace, out = tmp_path / "jobs.csv", tmp_path / "out"
        trace.write_text(HEAD + jobs)
        done = call(trace, "--machines", MACHINES, "--links", *orders, "--out", out)
        assert done.code == 0, done.error
        assert list(done.table) == [f"fifo+{order}" for order in orders]
        found = {}
        for order in orders:
            rows = {row["job"]: row for row in rows_of(out / f"fifo+{order}-0.jobs.csv")}
            found[order] = [float(rows[name]["ended_s"]) for name in ("a", "b")]
        return found

    return simulated


def fair_slowdown() -> float:
    """Of two jobs that compute for 1 s and send for 1 s, and begin as `sharing_of` draws.

    Begun d apart, each sends d alone and the other 1 - d at half the rate: 3 - d in place of 2 s.
    """
    draw = random.Random(0)
    return (3 - abs(2 * draw.random() - 2 * draw.random())) / 2


def test_two_equal_jobs(ends: Callable[..., dict[str, list[float]]]) -> None:
    found = ends(
        "a,0,2,200,gpu:1 cpu:3,1,1000\nb,0,2,200,gpu:1 cpu:1,1,1000\n", "fair", "crux", "cassini"
    )
    # The second of two levels, or one that begins a second later, sends while the other computes.
    assert found["crux"] == found["cassini"] == pytest.approx([200, 200])
    assert found["fair"] == pytest.approx([200 * fair_slowdown()] * 2)


def test_a_later_job_slows_an_earlier_one(ends: Callable[..., dict[str, list[float]]]) -> None:
    found = ends("a,0,2,200,gpu:1 cpu:3,1,1000\nb,100,2,200,gpu:1 cpu:1,1,1000\n", "fair")
    together_s = 100 * fair_slowdown()  # for the second half of the one, the first of the other
    assert found["fair"] == pytest.approx([100 + together_s, 200 + together_s])


def test_crux_example_1(ends: Callable[..., dict[str, list[float]]]) -> None:
    """Cao et al., section 4.2: the short job goes first, and the long one takes 6 in place of 4 s.

    So the devices compute for 1/2 and 1/3 of the time, 41.7 %, until the short job ends.
    """
    jobs = "a,0,2,400,gpu:1 cpu:3,2,2000\nb,0,2,200,gpu:1 cpu:1,1,1000\n"
    assert ends(jobs, "crux")["crux"] == pytest.approx([200 + 400 - 200 * 4 / 6, 200])


def test_what_cannot_be_shared_is_refused(tmp_path: Path, call: Callable[..., Called]) -> None:
    trace = tmp_path / "jobs.csv"
    trace.write_text(HEAD + "a,0,2,200,gpu:1,,\n")
    for machines, order, expected in (
        ("2x2gpu", "fair", "no machine has a bandwidth"),
        (MACHINES, "fair", "no job of .* says what it sends"),
    ):
        done = call(trace, "--machines", machines, "--links", order)
        assert done.code == 2
        assert re.search(expected, done.error), done.error
    for line, expected in (
        ("a,0,2,200,gpu:1,1,9\n", "order 'max' between jobs in 'max'; expected one of fair, crux"),
        ("a,0,2,200,gpu:1,1,\n", "compute_s and gradient_mb belong together"),
        ("a,0,2,200,gpu:1,1,0\n", "expected a number above 0"),
    ):
        trace.write_text(HEAD + line)
        done = call(trace, "--machines", MACHINES, "--links", "fair", "max")
        assert (done.code, expected in done.error) == (2, True)
