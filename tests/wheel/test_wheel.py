"""The wheel and the sdist, installed as a user installs them: an empty environment, no compiler.

The wheel under test has one engine, for the PyTorch that is installed here; released ones have
several (`make wheels`).
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from helpers.environments.installed import environment, install, run, trains_without_a_compiler

REPOSITORY = Path(__file__).parents[2]
ENGINE = "torch_{}_{}".format(*torch.__version__.split(".")[:2])
pytestmark = pytest.mark.timeout(900)


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
    return environment(tmp_path_factory.mktemp("user") / "venv", sys.executable)


def only(built: Path, pattern: str) -> Path:
    (file,) = built.glob(pattern)
    return file


def test_the_wheel_holds_modules_types_and_license(built: Path) -> None:
    wheel = only(built, "*.whl")
    # As old as docs/releasing.md promises; a newer glibc than Debian 12's gives newer symbols.
    here = tuple(map(int, platform.libc_ver()[1].split(".")[:2]))
    tag = re.search(r"manylinux_2_(\d+)_", wheel.name)
    assert tag is not None
    assert int(tag[1]) <= 34 or here > (2, 36)
    names = zipfile.ZipFile(wheel).namelist()
    for part in (
        "hvd_order/_native/_core.cpython",
        f"hvd_order/_native/{ENGINE}/_torch.cpython",
        "hvd_order/_native/_tensorflow_ops.cpython",
        "hvd_order/py.typed",
        "hvd_order/_native/_torch.pyi",
        "hvd_order_alias.pth",
        ".dist-info/licenses/LICENSE",
    ):
        assert any(part in name for name in names), part
    # PyTorch's libraries are the user's.
    assert not [name for name in names if "libtorch" in name or "libc10" in name]


def test_the_wheel_trains_where_there_is_no_compiler(built: Path, venv: Path) -> None:
    trains_without_a_compiler(venv, only(built, "*.whl"))


def test_the_sdist_builds_for_the_installed_pytorch(built: Path, venv: Path) -> None:
    # With pip's defaults: an isolated build, which does not see the environment's PyTorch.
    install(venv, only(built, "*.tar.gz"), os.environ["PATH"])
    code = "import hvd_order.torch, hvd_order._native._torch as engine; print(engine.__file__)"
    where = run([venv / "bin/python", "-c", code], {"PATH": str(venv / "bin")}, folder=venv)
    assert f"_native/{ENGINE}/" in where
    assert str(venv) in where


def test_without_pytorch_the_build_ends_with_the_cure(built: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", tmp_path / "venv"], os.environ)
    # pip would take the wheel that it has built from this sdist before; requirements come later.
    pip = [tmp_path / "venv/bin/python", "-m", "pip", "install", "--no-cache-dir", "--no-deps"]
    done = subprocess.run(
        [*pip, f"hvd_order[torch] @ {only(built, '*.tar.gz').as_uri()}"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "Install PyTorch first (pip install torch" in done.stderr + done.stdout
