"""The script that measures a GPU works, as far as the test device shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[3]
_CHECKS = ["kernels", "driver", "readiness", "issue", "death-gloo", "memcheck"]


def run_checks(names: list[str], out: Path) -> dict[str, Any]:
    """Each check's record; all must succeed or be skipped."""
    command = [
        sys.executable, "benchmarks/gpu/main.py", "--device", "test", "--check", *names,
        "--out", str(out),
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    checks: dict[str, Any] = json.loads(out.read_text())["raw"]["checks"]
    return checks


@pytest.mark.long  # a minute or more
@pytest.mark.timeout(240)
def test_all_ways_to_wait_have_the_same_weights(tmp_path: Path) -> None:
    check = run_checks(["waits-bf16_ef"], tmp_path / "gpu.json")["waits-bf16_ef"]
    assert check["outcome"] == "PASS"
    assert check["text"].endswith("enqueued, arrived, planned")


@pytest.mark.timeout(240)
def test_checks_pass_on_the_test_device(tmp_path: Path) -> None:
    checks = run_checks(_CHECKS, tmp_path / "gpu.json")
    found = {name: check["outcome"] for name, check in checks.items()}
    assert found == {name: "SKIP" if name == "memcheck" else "PASS" for name in _CHECKS}
    assert checks["memcheck"]["reason"] == "needs a GPU"
    assert set(checks["issue"]["figures"]) == {
        "leader_first_issue_s", "leader_slice_s", "planned_first_issue_s", "planned_slice_s",
        "bare_slice_s",
    }  # fmt: skip
