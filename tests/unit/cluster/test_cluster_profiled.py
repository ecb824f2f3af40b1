"""Speeds of a cluster's jobs that are predicted from the profile of one worker."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.workloads.load import load_jobs
from hvd_order.planning.files.profile import Profile, Timing
from hvd_order.planning.graph.graph import GraphOp, GraphParameter

HEAD = "name,workers,samples,profile,worker_batch,network_gbit,workers_per_server,mode\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the profile of a step of about 16 ms that exchanges 4 MB."""
    draw = random.Random(1)
    names = ("w0", "w1", "w2", "w3")
    ops = (
        GraphOp("f", 8e-3, (), names, ()),
        GraphOp("b", 8e-3, ("f",), (), names, phase="backward"),
    )
    timings = {
        op.name: Timing.of([8e-3 * (0.9 + 0.2 * draw.random()) for _ in range(20)]) for op in ops
    }
    parameters = tuple(GraphParameter(name, 1_000_000) for name in names)
    Profile("one layer", {}, parameters, ops, timings).write(tmp_path / "p.json")
    return tmp_path


def job(folder: Path, line: str):  # type: ignore[no-untyped-def]
    (folder / "jobs.csv").write_text(HEAD + line + "\n")
    (found,) = load_jobs(folder / "jobs.csv")
    return found


def test_workers_together_are_faster_than_apart(folder: Path) -> None:
    """On 1 Gbit/s an all-reduce of 4 MB takes twice the step's computation; on 10 less of it."""
    one = job(folder, "a,4,1000,p.json,32,1,,")
    alone = one.speed.samples_per_s(1, 0, 1, 1)
    assert alone == pytest.approx(32 / 16e-3, rel=0.05)
    together, apart = (one.speed.samples_per_s(4, 0, machines, 1) for machines in (1, 2))
    assert apart < 0.75 * together < 0.75 * 4 * alone
    # No step is shorter than its ring all-reduce: 2 (k - 1) / k of 4 MB.
    assert apart <= 4 * 32 / (1.5 * 4e6 / 125e6) * 1.01


def test_more_servers_bring_more(folder: Path) -> None:
    few = job(folder, "a,4,1000,p.json,32,1,4,async")
    many = job(folder, "a,4,1000,p.json,32,1,1,async")
    assert many.speed.samples_per_s(4, 4, 2, 1) > 1.5 * few.speed.samples_per_s(4, 1, 2, 1)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("a,4,1000,missing.json,32,1,,", "line 2: the profile .* cannot be read"),
        ("a,4,1000,p.json,32,,,", "line 2: a profile without network_gbit"),
        ("a,4,1000,p.json,32,1,,ring", "line 2: mode is 'ring'"),
        ("a,4,1000,p.json,32,1,,sync", "line 2: mode sync and None workers a server"),
        ("a,4,,p.json,32,1,,", "line 2: no duration_s"),
    ],
)
def test_bad_lines_are_named(folder: Path, line: str, text: str) -> None:
    with pytest.raises(InvalidUsage, match=text):
        job(folder, line)
