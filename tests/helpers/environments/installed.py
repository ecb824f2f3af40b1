"""An hvd_order that is installed elsewhere: environments, a training script, and what it prints."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

__all__ = ["TRAIN", "environment", "install", "run", "trains_without_a_compiler", "weights_in"]

TRAIN = Path(__file__).parents[2] / "wheel/train.py"


def weights_in(output: str) -> list[float]:
    """The weights that rank 0 of `TRAIN` has printed."""
    (line,) = [line for line in output.splitlines() if "weights " in line]
    return [float(number) for number in line.partition("weights ")[2].split()]


def run(
    command: Sequence[str | Path], environment: Mapping[str, str], folder: Path | None = None
) -> str:
    """What a program prints; it must succeed."""
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=800,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path, python: str) -> Path:
    """Makes a virtual environment that holds PyTorch alone, of the release installed here."""
    run([python, "-m", "venv", folder], os.environ)
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet"]
    run([*pip, "torch==" + torch.__version__.partition("+")[0]], os.environ)
    return folder


def install(venv: Path, what: Path, path: str) -> None:
    """Installs a wheel or an sdist, with ``path`` as PATH, in place of any before."""
    pip = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"]
    run([*pip, what], {**os.environ, "PATH": path}, folder=venv)


def trains_without_a_compiler(venv: Path, wheel: Path) -> None:
    """Installs a wheel where there is no compiler; two ranks must train as one does."""
    path = str(venv / "bin")
    assert shutil.which("g++", path=path) is None
    install(venv, wheel, path)
    alone = {"PATH": path, "HOME": str(venv)}
    assert "No broken requirements" in run([venv / "bin/pip", "check"], alone)
    report = run([venv / "bin/hvd-order", "doctor"], alone, folder=venv)
    assert "_native/torch_{}_{}/".format(*torch.__version__.split(".")[:2]) in report
    one = run([venv / "bin/python", TRAIN], alone, folder=venv)
    launched = [venv / "bin/hvd-order", "run", "-np", "2", venv / "bin/python", TRAIN]
    assert weights_in(run(launched, alone, folder=venv)) == pytest.approx(weights_in(one), abs=1e-6)
