"""``hvd-order profile -np N``: the script is recorded alone, the link among all ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers.launching import launcher_environment

from hvd_order.planning.files.profile import read_profile
from hvd_order.tools.cli.main import main

# Written for Horovod, with a process group of its own beside: both have to work alone.
SCRIPT = """
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


def profile(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "hvd_order.tools.cli", *arguments, str(script)],
        env=launcher_environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_the_profile_carries_the_link_of_its_ranks(tmp_path: Path) -> None:
    done = profile(tmp_path, SCRIPT, "profile", "-H", "localhost:2", "--steps", "5")
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
    done = profile(tmp_path, "raise ValueError('no data')", "profile", "-np", "2")
    assert done.returncode != 0
    assert "no data" in done.stderr
    assert not (tmp_path / "train.profile.json").exists()
