"""``hvd-order profile``: with ``-np N`` a script is recorded alone, the link among all ranks; with
``--servers S`` its job has real servers, and the profile says what they cost.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.flags import comes_true
from helpers.launching import launcher_environment, run_cli, write_script
from helpers.processes import environment_of, processes

from hvd_order.planning.files.profile import read_profile
from hvd_order.tools.cli.main import main

SCRIPT = """
import torch
import hvd_order.torch as hvd
hvd.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
"""
# Slices that are large enough to time, of more than one size, and no trials of other sizes.
ENV = {"HVD_ORDER_SLICE_BYTES": "512KiB", "HVD_ORDER_TIMEOUT": "60"}


def profile(
    folder: Path, source: str, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    env = launcher_environment({**ENV, "JOB_OF_TEST": str(folder), **(env or {})})
    return run_cli("profile", *arguments, write_script(folder, source)[1], env=env)


def nothing_runs(folder: Path) -> bool:
    """Whether within five seconds no process of the job runs any more, servers among them."""

    def jobs() -> list[str]:
        return [environment_of(pid).get("JOB_OF_TEST", "") for pid in processes()]

    return comes_true(lambda: str(folder) not in jobs())


@pytest.mark.timeout(180)
def test_the_profile_says_what_the_servers_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asynchronous servers that update; then the prediction needs no option about them."""
    asynchronous = {"HVD_ORDER_PS_UPDATE": "server", "HVD_ORDER_PS_MODE": "async"}
    endless = SCRIPT.format(steps=10**9)
    done = profile(tmp_path, endless, "--servers", "1", "--steps", "12", env=asynchronous)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "train.profile.json"
    recorded = read_profile(file)
    assert all(timing.runs == 12 for timing in recorded.timings.values()), "every step of each op"
    costs = recorded.servers
    assert costs is not None
    assert (costs.servers, costs.workers, costs.mode, costs.updates) == (1, 1, "async", "server")
    gradients = sum(parameter.size_bytes for parameter in recorded.parameters)
    for way in (costs.push, costs.answer):
        # The last steps' transfers may be under way, and one of a step before in flight.
        assert 10 * gradients <= way.size_bytes <= 13.1 * gradients
        # Between memories of one host: more than 1 MB/s, less than 1 TB/s.
        assert way.bytes_per_s is not None
        assert 1e6 < way.bytes_per_s < 1e12
    assert costs.update.seconds + costs.update.seconds_per_byte * 2**19 < 1
    assert "with 1 server, 1 worker, async:" in done.stdout
    assert "server, update:" in done.stdout
    assert nothing_runs(tmp_path)

    assert main(["predict", str(file), "--workers", "1,2", "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    assert "From the profile, measured with 1 server, 1 worker, async: the links, updates (" in said
    assert main(["predict", str(file), "--workers", "1,2", "--seeds", "2", "--bandwidth", "1gbit",
                 "--update-rate", "1GB/s", "--copy-rate", "1GB/s"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "As given: --bandwidth, --update-rate, --copy-rate." in said
    assert "From the profile" not in said


@pytest.mark.timeout(180)
def test_several_workers_and_servers_that_only_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = profile(tmp_path, SCRIPT.format(steps=30), "-np", "2", "--servers", "2", "--steps", "6")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "train.profile.json"
    costs = read_profile(file).servers
    assert costs is not None
    assert (costs.servers, costs.workers, costs.mode, costs.updates) == (2, 2, "sync", "worker")
    assert done.stdout.count("server, sum, as the servers did not update") == 1, "one rank says so"
    assert main(["predict", str(file), "--workers", "1,2", "--seeds", "2"]) == 0
    assert "The measured servers only summed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "env", "says"),
    [
        (SCRIPT.format(steps=7), {}, "ended after 7 optimizer steps; 4 + 5 are needed"),
        (
            SCRIPT.format(steps=10**9),
            {"HVD_ORDER_PS_MODE": "async"},
            "asynchronous workers need servers that update",
        ),
        pytest.param(
            "\n".join(
                line for line in SCRIPT.format(steps=10**9).splitlines() if "hvd.D" not in line
            ),
            {},
            "does not train with parameter servers",
            marks=pytest.mark.long,
        ),
        # Without servers: below.
        pytest.param("raise ValueError('no data')", {}, "no data", marks=pytest.mark.long),
    ],
    ids=["too_early", "no_servers_start", "not_used", "fails"],
)
def test_what_goes_wrong_is_said_and_nothing_is_written(
    tmp_path: Path, source: str, env: dict[str, str], says: str
) -> None:
    done = profile(tmp_path, source, "--steps", "5", "--servers", "1", env=env)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr or "no data" in says
    assert not (tmp_path / "train.profile.json").exists()
    assert nothing_runs(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-np", "0"], "-np 0: at least one process is needed"),
        (["--servers", "-1"], "--servers -1: expected a number from 0 on"),
    ],
)
def test_numbers_that_make_no_job_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["profile", *arguments, __file__]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.timeout(180)
def test_servers_that_do_not_come_are_named(tmp_path: Path) -> None:
    """A server that dies at once, because its interpreter finds another program of its name."""
    folder = tmp_path / "broken"
    folder.mkdir()
    # A file that every Python process of the job reads as it starts; servers end there.
    (folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'hvd_order.servers.process.process' in ' '.join(sys.orig_argv):\n"
        "    os._exit(3)\n"
    )
    env = launcher_environment()
    path = f"{folder}:{env['PYTHONPATH']}"
    done = profile(
        tmp_path, SCRIPT.format(steps=99), "--servers", "1", "--steps", "5",
        env={"PYTHONPATH": path, "HVD_ORDER_TIMEOUT": "10"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "server 0 has not come" in done.stderr
    assert not (tmp_path / "train.profile.json").exists()


# ---- without servers --------------------------------------------------------------------------

# Written for Horovod, with a process group of its own beside: both have to work alone.
BESIDE_A_GROUP = """
import torch
import torch.distributed as dist
import hvd_order.torch as hvd
dist.init_process_group("gloo")
hvd.init()
assert (hvd.size(), dist.get_world_size()) == (1, 1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


def test_the_profile_carries_the_link_of_its_ranks(tmp_path: Path) -> None:
    done = profile(tmp_path, BESIDE_A_GROUP, "-H", "localhost:2", "--steps", "5")
    assert done.returncode == 0, done.stderr
    recorded = read_profile(tmp_path / "train.profile.json")
    assert len(recorded.parameters) == 4
    link = recorded.link
    assert link is not None
    assert (link.ranks, link.backend) == (2, "gloo")
    # Between memories of one host: more than 1 MB/s, less than 1 TB/s.
    assert 1e-12 < link.link.seconds_per_byte < 1e-6
    assert 0 < link.link.latency_s < 1
    assert done.stdout.count("4 parameters") == 1, "one of the ranks says so"
    assert "gloo, 2 ranks" in done.stdout
    assert main(["advise", str(tmp_path / "train.profile.json")]) == 0, "no network to be named"


def test_a_script_that_fails_ends_all_ranks_and_says_why(tmp_path: Path) -> None:
    done = profile(tmp_path, "raise ValueError('no data')", "-np", "2")
    assert done.returncode != 0
    assert "no data" in done.stderr
    assert not (tmp_path / "train.profile.json").exists()
