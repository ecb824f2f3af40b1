"""Import paths of before, which README or docs have named."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from hvd_order.moved import MOVED

WITH_TENSORFLOW = [name for name in MOVED if "tensorflow" in name]


@pytest.mark.parametrize("old", sorted(set(MOVED) - set(WITH_TENSORFLOW)))
def test_an_old_path_gives_the_same_module_and_one_warning(old: str) -> None:
    program = (
        "import warnings, importlib; warnings.simplefilter('always'); "
        f"import {old}; import {old} as again; new = importlib.import_module({MOVED[old]!r}); "
        "print(again is new)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.strip() == "True"
    assert done.stderr.count("FutureWarning") == 1, done.stderr
    assert f"{old} is {MOVED[old]} now" in done.stderr


@pytest.mark.parametrize("old", WITH_TENSORFLOW)
def test_an_old_path_of_tensorflow(old: str) -> None:
    pytest.importorskip("tensorflow", reason="pip install -r requirements/tensorflow.txt")
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match="now; the old path goes"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])


def test_what_never_existed_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hvd_order.plan.nothing")
