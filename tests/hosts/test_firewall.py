"""A job whose connections a firewall between two hosts ends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import REPOSITORY
from helpers.training.scripts import TRAINS_FOR_EVER

sys.path.insert(0, str(REPOSITORY))
from benchmarks.hosts import EmulatedHosts, why_not
from benchmarks.hosts.namespaces import tool_environment

RANKS = 3


def refuse(hosts: EmulatedHosts, host: int, source: int) -> None:
    """Answers what another host sends by a reset, as a firewall that has forgotten a connection.

    Resets may pass, or the sender would not learn of it.
    """
    packets = f"--protocol tcp --source {hosts.addresses[source]} --tcp-flags RST NONE"
    command = ["iptables", "--append", "INPUT", *packets.split(), "--jump", "REJECT",
               "--reject-with", "tcp-reset"]  # fmt: skip
    done = hosts.popen(host, command, env=tool_environment(), stderr=subprocess.PIPE, text=True)
    said = done.communicate(timeout=20)[1]
    assert done.returncode == 0, said


def test_connections_that_are_cut_are_an_error_that_says_so(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    if shutil.which("iptables", path=tool_environment()["PATH"]) is None:
        pytest.skip("iptables is not installed")
    script = tmp_path / "train.py"
    script.write_text(TRAINS_FOR_EVER, encoding="utf-8")
    variables = {
        **os.environ,
        "HVD_ORDER_TIMEOUT": "10",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    command = [sys.executable, script]
    with EmulatedHosts(count=RANKS, rate_mbit=1000) as hosts:
        ranks = []
        for rank in range(RANKS):
            env = {**variables, **hosts.rank_environment(rank)}
            with (tmp_path / f"{rank}.err").open("w") as errors:
                ranks.append(
                    hosts.popen(
                        rank, command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
                    )
                )
        while "reached 5" not in (line := ranks[1].stdout.readline()):
            assert line, (tmp_path / "1.err").read_text()
        refuse(hosts, 1, 2)
        refuse(hosts, 2, 1)
        said = [rank.communicate(timeout=30)[0] for rank in ranks]
    for rank, process in enumerate(ranks):
        assert process.returncode == 3, (tmp_path / f"{rank}.err").read_text()
        assert "raised PeerLost: rank " in said[rank]
    # A step or the line between ranks 1 and 2 notices first.
    words = "lost a connection to another rank|a connection between two of them is broken"
    assert re.search(words, said[1] + said[2])
