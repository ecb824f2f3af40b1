"""The health check of containers: quick, without PyTorch, and right."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import REPOSITORY

from hvd_order.tools.cli.main import main

CHECK = [sys.executable, "-X", "importtime", "-m", "hvd_order.tools.doctor.health"]


def check(path: Path = REPOSITORY, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{REPOSITORY}", **variables}
    return subprocess.run(CHECK, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_healthy_installation_is_found_so_without_pytorch() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = check()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("healthy: engine for PyTorch 2.")
    assert "hvd_order._native._core" in done.stderr  # what is imported
    assert "torch_engines" in done.stderr
    assert not [
        line for line in done.stderr.splitlines() if line.rpartition("|")[2].strip() == "torch"
    ]
    # Of the processor: other work on the machine does not change it much.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_a_pytorch_without_an_engine_is_named(tmp_path: Path) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise AssertionError")
    (torch / "version.py").write_text("__version__ = '2.99.0'")
    done = check(tmp_path)
    assert done.returncode == 1
    assert "none for the installed 2.99; install one of those, or build the engine: " in done.stdout


def test_it_is_an_option_of_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--health"]) == 0
    assert capsys.readouterr().out.startswith("healthy: ")
