"""The wheel and the sdist, installed as a user installs them: an empty environment, no compiler.

The wheel under test has one engine, for the PyTorch that is installed here; released ones have
several (`make wheels`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from helpers.installed import TRAIN, weights_in

REPOSITORY = Path(__file__).parents[2]
ENGINE = "torch_{}_{}".format(*torch.__version__.split(".")[:2])
pytestmark = pytest.mark.timeout(900)


def run(
    command: Sequence[str | Path], environment: Mapping[str, str], folder: Path | None = None
) -> str:
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel and the sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, REPOSITORY / "scripts/build_wheels.py", "--out", out]
    folder = Path(torch.__file__).parent
    run([*command, "--pythons", sys.executable, "--torch-folders", folder], os.environ)
    return out


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds PyTorch alone."""
    folder = tmp_path_factory.mktemp("user") / "venv"
    run([sys.executable, "-m", "venv", folder], os.environ)
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet"]
    run([*pip, "torch==" + torch.__version__.partition("+")[0]], os.environ)
    return folder


def install(venv: Path, what: Path, path: str) -> None:
    pip = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"]
    run([*pip, what], {**os.environ, "PATH": path}, folder=venv)


def only(built: Path, pattern: str) -> Path:
    (file,) = built.glob(pattern)
    return file


def test_the_wheel_holds_modules_types_and_license(built: Path) -> None:
    wheel = only(built, "*.whl")
    assert "manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for part in (
        "hvd_order/_core.cpython",
        f"hvd_order/_torch_engines/{ENGINE}/_torch.cpython",
        "hvd_order/_tensorflow_ops.cpython",
        "hvd_order/py.typed",
        "hvd_order/_torch.pyi",
        "hvd_order_alias.pth",
        ".dist-info/licenses/LICENSE",
    ):
        assert any(part in name for name in names), part
    # PyTorch's libraries are the user's.
    assert not [name for name in names if "libtorch" in name or "libc10" in name]


def test_the_wheel_trains_where_there_is_no_compiler(built: Path, venv: Path) -> None:
    path = str(venv / "bin")
    assert shutil.which("g++", path=path) is None
    install(venv, only(built, "*.whl"), path)
    alone = {"PATH": path, "HOME": str(venv)}
    assert "No broken requirements" in run([venv / "bin/pip", "check"], alone)
    report = run([venv / "bin/hvd-order", "doctor"], alone, folder=venv)
    assert f"_torch_engines/{ENGINE}/" in report
    one = run([venv / "bin/python", TRAIN], alone, folder=venv)
    two = run(
        [venv / "bin/hvd-order", "run", "-np", "2", venv / "bin/python", TRAIN], alone, folder=venv
    )
    assert weights_in(two) == pytest.approx(weights_in(one), abs=1e-6)


def test_the_sdist_builds_for_the_installed_pytorch(built: Path, venv: Path) -> None:
    # With pip's defaults: an isolated build, which does not see the environment's PyTorch.
    install(venv, only(built, "*.tar.gz"), os.environ["PATH"])
    code = "import hvd_order.torch, hvd_order._torch as engine; print(engine.__file__)"
    where = run([venv / "bin/python", "-c", code], {"PATH": str(venv / "bin")}, folder=venv)
    assert f"_torch_engines/{ENGINE}/" in where
    assert str(venv) in where
