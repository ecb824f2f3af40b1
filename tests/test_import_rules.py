"""Who may import whom, looked at from a fresh interpreter; the rest is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
FRAMEWORK_FREE = [
    "",
    "._native._core",
    ".base.config",
    ".base.errors",
    ".launch",
    ".launch.run",
    ".launch.elastic",
    ".planning.report",
    ".planning.predict.simulate",
    ".servers.access.secret",
    ".tools.check.run",
    ".tools.cli.main",
    ".tools.doctor.report",
    ".compat.horovod",
    ".compat.horovod.startup",
    ".array",
]


def loaded_frameworks(module: str) -> list[str]:
    program = (
        f"import {module}, sys; print([m for m in ('torch', 'tensorflow') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    return list(re.findall(r"'(\w+)'", done.stdout))


@pytest.mark.parametrize("module", FRAMEWORK_FREE)
def test_imports_without_a_framework(module: str) -> None:
    assert loaded_frameworks(f"hvd_order{module}") == []


def test_this_test_can_fail() -> None:
    assert loaded_frameworks("hvd_order.torch") == ["torch"]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install -r requirements/tensorflow.txt",
)
def test_tensorflow_users_do_not_import_pytorch() -> None:
    assert loaded_frameworks("hvd_order.keras") == ["tensorflow"]


def test_cpp_reads_no_environment() -> None:
    readers = [
        path for path in (ROOT / "csrc").rglob("*.[ch]*") if "getenv" in path.read_text("utf-8")
    ]
    assert readers == []


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("base", {"base"}),
        ("torch/cuda", {"base", "torch/cuda"}),
        ("scheduler", {"base", "scheduler"}),
        ("planning", {"base", "scheduler", "servers/admission", "planning"}),
        ("servers/arithmetic", {"base", "servers/arithmetic"}),
        ("servers/wire", {"base", "servers/arithmetic", "servers/wire"}),
        ("servers/worker", {"base", "servers/arithmetic", "servers/wire", "servers/worker"}),
        ("servers/admission", {"base", "servers/arithmetic", "servers/wire", "servers/admission"}),
        (
            "servers/slice",
            {
                "base",
                "servers/arithmetic",
                "servers/wire",
                "servers/admission",
                "servers/slice",
            },
        ),
        ("transport", {"base", "scheduler", "transport"}),
        ("engine", {"base", "scheduler", "engine", "transport"}),
    ],
)
def test_cpp_rooms_include_downwards(room: str, allowed: set[str]) -> None:
    for path in _includes_only(room, allowed):
        foreign = re.findall(
            r"#include <(\S*(?:torch|pybind|ATen|c10)\S*)>", path.read_text("utf-8")
        )
        assert foreign == [], f"{path} sees a foreign library"


def test_cpp_core_includes_no_wing() -> None:
    assert _includes_only("torch", {"base", "scheduler", "engine", "transport", "torch"})


def _includes_only(room: str, allowed: set[str]) -> list[Path]:
    paths = list((ROOT / "csrc" / room).rglob("*.[ch]*"))
    for path in paths:
        for included in re.findall(r'#include "([^"]+)"', path.read_text("utf-8")):
            folders = {str(folder) for folder in PurePosixPath(included).parents}
            assert folders & allowed, f"{path}: {included}"
    return paths
