"""The script that measures a GPU works, as far as the test device shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)

_ROOT = Path(__file__).resolve().parents[3]
_CHECKS = ["kernels", "driver", "readiness", "issue", "waits-bf16_ef", "death-gloo", "memcheck"]


def test_checks_pass_on_the_test_device(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [
        sys.executable, "benchmarks/gpu/main.py", "--device", "test", "--check", *_CHECKS,
        "--out", str(out),
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    checks = json.loads(out.read_text())["raw"]["checks"]
    found = {name: check["outcome"] for name, check in checks.items()}
    assert found == {name: "SKIP" if name == "memcheck" else "PASS" for name in _CHECKS}
    assert checks["waits-bf16_ef"]["text"].endswith("enqueued, arrived, planned")
    assert checks["memcheck"]["reason"] == "needs a GPU"
    assert set(checks["issue"]["figures"]) == {
        "leader_first_issue_s", "leader_slice_s", "planned_first_issue_s", "planned_slice_s",
        "bare_slice_s",
    }  # fmt: skip
