"""The side-by-side benchmark: its models are right, and all of its machinery runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.launching import run_cli

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.hosts import why_not  # noqa: E402
from benchmarks.runner.workloads.profiles import PROFILES  # noqa: E402

PARAMETERS = {  # as published, in millions
    "resnet50": 25.557, "vgg16": 138.358, "densenet121": 7.979, "gpt2_small": 124.440,
    "bert_large": 336.2,
}  # fmt: skip


# And a fast link: these are about the machinery.
UNTUNED = ["--env", "HVD_ORDER_TUNE=0"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_profiles_have_the_published_sizes(name: str) -> None:
    profile = PROFILES[name]()
    millions = profile.size_bytes / 4e6
    assert millions == pytest.approx(PARAMETERS[name], rel=2e-3)
    assert profile.scaled_to(3.0).compute_s == pytest.approx(3.0)


@pytest.mark.timeout(240)
@pytest.mark.skipif(why_not() is not None, reason=f"no emulated hosts here: {why_not()}")
def test_the_comparison_runs() -> None:
    done = run_cli("bench", "--quick", "--name", "quick_test", "--rate-mbit", 4000, *UNTUNED)
    assert done.returncode == 0, done.stderr
    path = ROOT / "out" / "results" / "quick_test.json"
    cells = json.loads(path.read_text())["raw"]["cells"]
    assert [cell["setting"]["model"] for cell in cells] == ["resnet50", "densenet121"]
    for cell in cells:
        assert cell["same_weights"]
        assert set(cell["systems"]) == {"local", "ddp", "hvd_order"}
        for name, system in cell["systems"].items():
            assert len(system["seconds"]) == 3
            sent = min(system["sent_bytes"])
            # Between two hosts a ring sends each gradient once; headers come on top.
            assert name == "local" or 0.999 < sent / cell["size_bytes"] < 1.1
    for kind in ("bars", "step"):
        assert path.with_name(f"quick_test_{kind}.png").stat().st_size > 1000


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.skipif(why_not() is not None, reason=f"no emulated hosts here: {why_not()}")
def test_the_comparison_runs_with_clipping() -> None:
    done = run_cli(
        "bench", "--name", "clip_test", "--clip", "--models", "densenet121", "--rate-mbit", 4000,
        "--rounds", 1, "--steps", 2, "--systems", "ddp_tuned", "hvd_order", "--buckets-mib", 5,
        *UNTUNED,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "densenet121, clipped at norm 1: optimum" in done.stdout
    (cell,) = json.loads((ROOT / "out/results/clip_test.json").read_text())["raw"]["cells"]
    assert cell["same_weights"]
    assert cell["setting"]["clip"] == 1.0
    bounds = cell["clip_bounds"]
    assert 0 < cell["optimum_s"] <= min(bounds["unsplit_s"], bounds["late_gathers_s"])
