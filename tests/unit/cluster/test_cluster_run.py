"""hvd-order cluster run: the table, the files of outcomes, and what it refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.cluster_runs import (
    MACHINES,
    TRACE,
    Called,
    contents,
    rows_of,
)

from hvd_order.cluster.policies import registry
from hvd_order.cluster.policies.registry import POLICIES
from hvd_order.cluster.simulate.compare import Comparison, sample
from hvd_order.cluster.simulate.outcome import JobOutcome
from hvd_order.cluster.simulate.simulator import Rules
from hvd_order.cluster.workloads.load import load_jobs
from hvd_order.cluster.workloads.machines import parse_machines

pytestmark = pytest.mark.usefixtures("policies")


# --- table and files ---------------------------------------------------------------------------


def test_the_table_compares_all_policies(trace: Path, call: Callable[..., Called]) -> None:
    done = call(trace, "--machines", MACHINES, "--policy", "fifo", "last", "choosy")
    assert done.code == 0
    table = done.table
    assert list(table) == ["fifo", "last", "choosy"]
    # By hand: resnet 0-3600 s; bert waits for all 8 GPUs, 3600-10800 s; then the other three fit.
    assert table["fifo"]["mean completion, hours"] == "2.83"
    assert table["fifo"]["makespan, hours"] == "4.5"
    assert [table[name]["rejected"] for name in table] == ["0", "0", "2"]
    assert [table[name]["utility"] for name in table] == ["5", "5", "3"]
    # choosy: resnet 0-3600 s and gpt 700-6100 s leave 2 GPUs, so dlrm waits for the first.
    assert table["choosy"]["makespan, hours"] == f"{6100 / 3600:.3g}"
    assert "5 jobs; 2 machines with 8 gpu, 64 cpu in all." in done.out


def test_rows_of_jobs_and_placements_add_up_to_the_metrics(
    trace: Path, tmp_path: Path, call: Callable[..., Called]
) -> None:
    out = tmp_path / "runs"
    call(trace, "--machines", MACHINES, "--policy", "fifo", "choosy", "--out", out)
    summary = {row["policy"]: row for row in rows_of(out / "runs.csv")}
    assert set(summary) == {"fifo", "choosy"}
    for name, metrics in summary.items():
        jobs = rows_of(out / f"{name}-0.jobs.csv")
        placements = rows_of(out / f"{name}-0.placements.csv")
        ended = [row for row in jobs if row["ended_s"]]
        times = [float(row["ended_s"]) - float(row["arrival_s"]) for row in ended]
        assert sorted(row["job"] for row in jobs) == ["bert", "dlrm", "gpt", "resnet", "vgg"]
        assert [float(row["completion_s"]) for row in ended] == times
        assert len(jobs) == float(metrics["jobs"])
        assert len(ended) == float(metrics["completed"])
        assert sum(row["rejected"] == "1" for row in jobs) == float(metrics["rejected"])
        assert sum(float(row["utility"]) for row in jobs) == float(metrics["utility"])
        assert float(metrics["completion_mean_s"]) == pytest.approx(sum(times) / len(times))
        assert float(metrics["completion_p95_s"]) == pytest.approx(np.quantile(times, 0.95))
        assert float(metrics["fairness_worst"]) == max(float(row["fairness"]) for row in ended)
        makespan_s = max(float(row["ended_s"]) for row in ended)  # the first job arrives at 0
        assert float(metrics["makespan_s"]) == makespan_s
        for resource, amount in (("gpu", 8), ("cpu", 64)):
            used = sum(
                float(row[resource]) * (float(row["end_s"]) - float(row["begin_s"]))
                for row in placements
            )
            share = float(metrics[f"utilisation_{resource}"])
            assert share == pytest.approx(used / (amount * makespan_s))
        for row in jobs:
            worker_s = sum(
                int(p["workers"]) * (float(p["end_s"]) - float(p["begin_s"]))
                for p in placements
                if p["job"] == row["job"]
            )
            assert worker_s == pytest.approx(float(row["worker_s"]))


def test_seeds_give_intervals_where_something_is_drawn(
    trace: Path, tmp_path: Path, call: Callable[..., Called]
) -> None:
    out = tmp_path / "runs"
    done = call(trace, "--machines", MACHINES, "--policy", "fifo", "shuffled",
                "--seeds", 3, "--seed", 7, "--out", out)  # fmt: skip
    runs = [(row["policy"], row["seed"]) for row in rows_of(out / "runs.csv")]
    assert runs == [("fifo", "7"), ("shuffled", "7"), ("shuffled", "8"), ("shuffled", "9")]
    assert "±" not in " ".join(done.table["fifo"].values())
    means = [float(row["completion_mean_s"]) / 3600 for row in rows_of(out / "runs.csv")[1:]]
    assert len(set(means)) > 1
    half = 4.3027 * np.std(means, ddof=1) / math.sqrt(3)  # of a table of Student's t
    cell = done.table["shuffled"]["mean completion, hours"]
    assert cell == f"{np.mean(means):.3g} ± {half:.3g}"


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, call: Callable[..., Called]) -> None:
    def done(folder: str, seed: int) -> tuple[str, dict[str, bytes]]:
        out = tmp_path / folder
        found = call("synthetic", "--jobs", 8, "--seeds", 2, "--seed", seed, "--out", out,
                     "--policy", "fifo", "shuffled", "--slot", "1h", "--until", "40h")  # fmt: skip
        files = contents(out)
        del files["runs.csv"]  # has the times that decisions took
        return found.result, files

    first, again, other = done("a", 3), done("b", 3), done("c", 4)
    assert again == first
    assert other[0] != first[0]
    assert first[1]["fifo-3.jobs.csv"] != first[1]["fifo-4.jobs.csv"]
    assert other[1]["fifo-4.jobs.csv"] == first[1]["fifo-4.jobs.csv"]


@pytest.mark.parametrize("name", sorted(set(POLICIES) - registry.RANDOM))
def test_policies_that_are_not_said_to_draw_do_not(name: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(TRACE)
    machines = parse_machines(MACHINES)

    def ends(seed: int) -> list[JobOutcome]:
        found: list[JobOutcome] = []
        rules = Rules(slot_s=600.0, until_s=12 * 3600.0)
        runs = Comparison(lambda _: load_jobs(path), False, machines, rules, [name], [seed])
        runs.run(name, seed, None, found.append)
        return found

    assert ends(1) == ends(2)


def test_with_slots_and_an_end(trace: Path, call: Callable[..., Called]) -> None:
    done = call(trace, "--machines", MACHINES, "--slot", "10min", "--until", "3.4h")
    # bert starts at the slot's start at 3600 s and ends at 10800 s; of the others vgg ends in time.
    assert done.table["fifo"]["ended"] == "3"
    assert "starts of slots of 600 s" in done.out
    costly = call(trace, "--machines", MACHINES, "--start-cost", "10min")
    assert costly.table["fifo"]["makespan, hours"] == f"{4.5 + 3 * 600 / 3600:.3g}"


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "options", "named"),
    [
        ("dlrm,1800,4,soon,gpu:1 cpu:4,dlrm", [], "jobs.csv, line 6: duration_s is 'soon'"),
        ("dlrm,1800,9,1800,gpu:1 cpu:4,dlrm", [], "jobs.csv, line 6: job 'dlrm' needs 9 workers"),
        (None, ["--policy", "fifo", "no-such"], "no policy is called 'no-such'"),
        (None, ["--machines", "many"], "machines 'many'"),
        (None, ["--jobs", "3"], "--jobs is for a synthetic trace"),
        (None, ["--seeds", "0"], "--seeds is 0"),
        (None, ["--format", "no-such"], "'no-such'"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(
    wrong: str | None,
    options: list[str],
    named: str,
    trace: Path,
    tmp_path: Path,
    call: Callable[..., Called],
) -> None:
    if wrong is not None:
        trace.write_text("\n".join([*TRACE.splitlines()[:-1], wrong]) + "\n")
    machines = [] if "--machines" in options else ["--machines", MACHINES]
    done = call(trace, *machines, *options, "--out", tmp_path / "runs",
                "--png", tmp_path / "a.png", "--html", tmp_path / "a.html")  # fmt: skip
    assert done.code == 2
    assert done.out == ""
    assert named in done.error
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.csv"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["jobs.csv"], "no --machines; expected such as --machines 4x8gpu"),
        (["synthetic", "--format", "jobs"], "--format is for a file"),
        (
            ["synthetic", "--machines", "4x8gpu"],
            "synthetic jobs do not fit these --machines: job-0",
        ),
        (["synthetic", "--machines", "1xgpu:2,cpu:9,memory_gb:40,disk_gb:40"], "do not fit"),
        (["nothing.csv", "--machines", "4x8gpu"], "nothing.csv cannot be read"),
    ],
)
def test_impossible_calls(
    arguments: list[str], named: str, trace: Path, call: Callable[..., Called],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(trace.parent)
    done = call(*arguments)
    assert done.code == 2
    assert named in done.error


@pytest.mark.parametrize("missing", ["numpy", "scipy"])
def test_without_numpy_or_scipy_the_error_says_what_to_install(
    missing: str, trace: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    done = call(trace, "--machines", MACHINES)
    assert done.code == 2
    assert f"needs {missing}" in done.error
    assert "pip install 'hvd_order[cluster]'" in done.error


def test_the_command_line_itself_needs_no_numpy() -> None:
    program = "import hvd_order.tools.cli.main, sys; print({'numpy', 'scipy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout == "set()\n"


# --- parts -------------------------------------------------------------------------------------


def test_a_sample_has_all_of_few_and_any_of_many() -> None:
    assert sample("abc", 3, 0) == (3, ["a", "b", "c"])
    assert sample("", 3, 0) == (0, [])
    seen = np.zeros(10)
    for seed in range(3000):
        count, found = sample(range(10), 3, seed)
        assert count == 10
        assert found == sorted(set(found))
        assert len(found) == 3
        seen[found] += 1
    # Each is drawn with probability 0.3: 5 standard deviations are 5 sqrt(3000 0.3 0.7).
    assert np.abs(seen - 900).max() < 5 * math.sqrt(3000 * 0.3 * 0.7)
