"""The wheels of a release, each in an empty environment of its Python (`make release`)."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from helpers.environments.installed import environment, trains_without_a_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from build_wheels import find_python

DIST = os.environ.get("HVD_ORDER_DIST", "")
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not DIST, reason="HVD_ORDER_DIST names no folder of wheels: make release"),
]


@pytest.mark.parametrize("wheel", sorted(Path(DIST or "nowhere").glob("*.whl")), ids=str)
def test_it_trains_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    (major, minor) = re.findall(r"-cp(\d)(\d+)-", wheel.name)[0]
    python = find_python(f"{major}.{minor}")
    assert python is not None, f"Python {major}.{minor} has built {wheel.name}"
    trains_without_a_compiler(environment(tmp_path / "venv", python), wheel.resolve())
