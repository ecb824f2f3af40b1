"""Wheels for the other Pythons that this machine has, as `make wheels` builds them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from helpers.environments.installed import environment, run, trains_without_a_compiler

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from build_wheels import PYTHONS, find_python  # noqa: E402

HERE = "{}.{}".format(*sys.version_info)
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("version", [each for each in PYTHONS if each != HERE])
def test_the_wheel_of_another_python_trains(version: str, tmp_path: Path) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"Python {version} is not on this machine")
    release = torch.__version__.rpartition(".")[0]
    build = [sys.executable, REPOSITORY / "scripts/build_wheels.py", "--out", tmp_path / "dist"]
    run([*build, "--pythons", python, "--torch", release], os.environ)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert f"cp{version.replace('.', '')}-" in wheel.name
    trains_without_a_compiler(environment(tmp_path / "venv", python), wheel)
