"""Import paths of before, which README or docs have named."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from hvd_order.moved import MOVED

WITH_TENSORFLOW = [name for name in MOVED if "tensorflow" in name]

IMPORT_EACH = """
import importlib, json, sys, warnings
found = {}
for old, new in json.loads(sys.argv[1]).items():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first, again = importlib.import_module(old), importlib.import_module(old)
    same = first is again is importlib.import_module(new)
    found[old] = same, [str(w.message) for w in said if w.category is FutureWarning]
print(json.dumps(found))
"""


def test_an_old_path_gives_the_same_module_and_one_warning() -> None:
    paths = {old: new for old, new in MOVED.items() if old not in WITH_TENSORFLOW}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, json.dumps(paths)],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    for old, (same, warned) in json.loads(done.stdout).items():
        assert same, old
        (text,) = warned
        assert text.startswith(f"{old} is {paths[old]} now")


@pytest.mark.parametrize("old", WITH_TENSORFLOW)
def test_an_old_path_of_tensorflow(old: str) -> None:
    pytest.importorskip("tensorflow", reason="pip install -r requirements/tensorflow.txt")
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match="now; the old path goes"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])


def test_what_never_existed_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hvd_order.planning.nothing")
