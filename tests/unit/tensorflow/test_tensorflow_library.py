"""The library of operators: it works, and is tested before it is used."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from sysconfig import get_config_var
from typing import Any

import pytest
from helpers.training.keras_jobs import MARKS

pytestmark = MARKS
PACKAGE = Path(__file__).parents[3] / "hvd_order/_native"
LIBRARY = PACKAGE / f"_tensorflow_ops{get_config_var('EXT_SUFFIX')}"


def test_every_operator_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvd_order.tensorflow.backend.self_test", str(LIBRARY)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def test_one_binary_needs_nothing_of_tensorflow() -> None:
    wanted = subprocess.run(
        ["readelf", "--dynamic", str(LIBRARY)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "libstdc++" in wanted
    assert "tensorflow_framework" not in wanted


def test_it_is_tested_once_for_a_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hvd_order.base.errors import InvalidUsage
    from hvd_order.tensorflow.backend import op_library

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    verdicts = iter(["", "it crashed"])
    monkeypatch.setattr(op_library, "_self_test", lambda path: next(verdicts))
    assert op_library._tested() == LIBRARY
    assert op_library._tested() == LIBRARY  # remembered: not tried again
    monkeypatch.setattr(op_library.tf, "__version__", "1.0")
    with pytest.raises(InvalidUsage, match=r"TensorFlow 1\.0 .*it crashed.*install a version"):
        op_library._tested()
    monkeypatch.setattr(op_library, "_SUFFIX", ".none")
    with pytest.raises(InvalidUsage, match="were not built"):
        op_library._tested()


def test_a_crash_is_an_answer(tmp_path: Path) -> None:
    from hvd_order.tensorflow.backend import op_library

    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    assert "ended with code 1" in op_library._self_test(broken)


def functions(body: list[ast.stmt]) -> dict[str, list[tuple[str, str | None]]]:
    """Arguments of the public functions of a module, with their defaults."""
    found = {}
    for node in body:
        if isinstance(node, ast.If):
            found.update(functions(node.body))
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = node.args.args
            defaults = [None] * (len(arguments) - len(node.args.defaults))
            values = [*defaults, *map(ast.unparse, node.args.defaults)]
            found[node.name] = [(a.arg, v) for a, v in zip(arguments, values, strict=True)]
    return found


@pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)
@pytest.mark.parametrize(
    ("module", "sources"),
    [
        ("tensorflow", ["tensorflow/__init__.py", "tensorflow/mpi_ops.py",
                        "tensorflow/functions.py", "common/process_sets.py"]),
        ("tensorflow.keras", ["tensorflow/keras/__init__.py"]),
    ],
)  # fmt: skip
def test_signatures_are_horovods(module: str, sources: list[str]) -> None:
    spec = importlib.util.find_spec("horovod")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    ours: Any = importlib.import_module(f"hvd_order.{module}")
    theirs = {}
    for source in sources:
        theirs.update(functions(ast.parse((folder / source).read_text("utf-8")).body))
    compared = [name for name in theirs if name in ours.__all__ and name != "init"]
    assert {"DistributedOptimizer", "allreduce", "broadcast"} <= set(compared)
    for name in compared:
        mine = list(inspect.signature(getattr(ours, name)).parameters.values())
        assert [p.name for p in mine][: len(theirs[name])] == [a for a, _ in theirs[name]], name
        for parameter, (_, default) in zip(mine, theirs[name], strict=False):
            assert (parameter.default is parameter.empty) == (default is None), name
            if default is not None:
                assert parameter.default == eval(default, vars(ours)), f"{name}({parameter.name})"
        assert all(p.default is not p.empty for p in mine[len(theirs[name]) :]), name
