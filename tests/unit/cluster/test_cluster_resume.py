"""hvd-order cluster run --out: complete runs are not repeated, others are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cluster_runs import (
    MACHINES,
    TRACE,
    Breaking,
    Called,
    Chosen,
    contents,
)

from hvd_order.cluster.policies.registry import POLICIES, PolicyInputs

pytestmark = pytest.mark.usefixtures("policies")


def test_complete_runs_are_not_repeated(
    trace: Path, tmp_path: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (trace, "--machines", MACHINES, "--out", tmp_path / "runs", "--policy", "fifo")
    first = call(*options)
    before = contents(tmp_path / "runs")
    simulated: list[str] = []

    def counted(known: PolicyInputs) -> Chosen:
        return Chosen(lambda names: simulated.append("last") or names)

    monkeypatch.setitem(POLICIES, "last", counted)
    monkeypatch.setitem(POLICIES, "fifo", lambda _: Chosen(lambda n: simulated.append("fifo") or n))
    assert call(*options).out == first.out
    assert simulated == []
    assert contents(tmp_path / "runs") == before
    both = call(*options, "last")
    assert set(simulated) == {"last"}
    assert both.table["fifo"] == first.table["fifo"]


def test_a_run_that_broke_off_is_repeated(
    trace: Path, tmp_path: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "runs", tmp_path / "whole"
    options = (trace, "--machines", MACHINES, "--policy", "last", "fifo", "--out")
    call(*options, whole)
    with monkeypatch.context() as broken:
        broken.setitem(POLICIES, "fifo", lambda _: Breaking())
        assert call(*options, out).code == 2
    assert sorted(contents(out)) == ["last-0.jobs.csv", "last-0.placements.csv", "options.json",
                                     "runs.csv"]  # fmt: skip
    # What a killed process leaves: files under other names, or not all files.
    (out / "fifo-0.jobs.csv.part").write_text("job,model\nresn")
    (out / "last-0.placements.csv").unlink()
    done = call(*options, out)
    assert done.code == 0
    found, expected = contents(out), contents(whole)
    assert set(found) == set(expected)
    for name in set(found) - {"runs.csv"}:
        assert found[name] == expected[name]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--machines", "3xgpu:4,cpu:32"], "--machines"),
        (["--machines", MACHINES, "--slot", "60s"], "--slot"),
        (["--machines", MACHINES, "--until", "1d"], "--until"),
        (["--machines", MACHINES, "--resize-cost", "30s"], "--resize-cost"),
    ],
)
def test_other_options_refuse_the_folder(
    options: list[str], named: str, trace: Path, tmp_path: Path, call: Callable[..., Called]
) -> None:
    out = tmp_path / "runs"
    call(trace, "--machines", MACHINES, "--out", out)
    before = contents(out)
    done = call(trace, *options, "--out", out)
    assert done.code == 2
    assert f"{out} holds runs of another call: {named} was" in done.error
    assert "choose another --out" in done.error
    assert contents(out) == before


def test_a_changed_trace_refuses_the_folder(
    trace: Path, tmp_path: Path, call: Callable[..., Called]
) -> None:
    out = tmp_path / "runs"
    call(trace, "--machines", MACHINES, "--out", out)
    trace.write_text(TRACE.replace("5400", "5500"))
    done = call(trace, "--machines", MACHINES, "--out", out)
    assert done.code == 2
    assert "the trace was a file with SHA-256" in done.error


def test_a_folder_of_something_else_is_left_alone(
    trace: Path, tmp_path: Path, call: Callable[..., Called]
) -> None:
    done = call(trace, "--machines", MACHINES, "--out", tmp_path)
    assert done.code == 2
    assert "no options.json of an earlier call" in done.error
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.csv"]
