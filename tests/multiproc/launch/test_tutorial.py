"""Every command of docs/tutorial.md; the one for two machines is in tests/hosts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from helpers.launching import launcher_environment
from helpers.ranks import free_port
from helpers.training import tutorial


def test_each_command_works(tmp_path: Path) -> None:
    tutorial.save_files(tmp_path)
    for command in tutorial.commands():
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        if "train.profile.json" not in command and "check" not in command:
            assert tutorial.has_learnt(done.stdout), f"{command}: {done.stdout}"
    assert (tmp_path / "train.profile.json").exists()


@pytest.mark.long
def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    tutorial.save_files(tmp_path)
    [command] = tutorial.commands("torchrun")
    command = [word.replace("node1:29500", f"127.0.0.1:{free_port()}") for word in command]
    agents = [
        subprocess.Popen(
            command, cwd=tmp_path, env=launcher_environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]  # fmt: skip
    texts = [agent.communicate(timeout=100)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], texts
    assert tutorial.has_learnt("".join(texts)), texts
