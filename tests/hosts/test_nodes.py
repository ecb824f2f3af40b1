"""The benchmark of real nodes: its whole machinery runs, and its arithmetic is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import run_cli
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.torch.nodes_measure import exposed_seconds  # noqa: E402


def compared(out: Path, *options: str) -> dict[str, Any]:
    """The result file of the command with a small model on the CPU."""
    done = run_cli(
        "bench", "--device", "cpu", "--models", "small_cnn", *options, "--out", out, timeout=280
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    document: dict[str, Any] = json.loads(out.read_text("utf-8"))
    assert document["settings"]["ranks"] == 2
    return document


@pytest.mark.timeout(300)
def test_the_command_compares_systems_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    systems = ["--systems", "ddp_tuned", "fsdp2", "hvd_order"]
    document = compared(
        out, "-np", "2", *systems, "--rounds", "2", "--steps", "2", "--settle", "10"
    )
    assert document["summary"]["link_gbit"] > 0
    (row,) = document["summary"]["rows"]
    assert row["model"] == "small_cnn"
    assert set(row["systems"]) == {"ddp_tuned", "fsdp2", "hvd_order"}
    assert row["against"]["system"] in {"ddp_tuned", "fsdp2"}
    assert "| small_cnn" in out.with_suffix(".md").read_text("utf-8")
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_on_emulated_hosts_have_links_of_the_rate(tmp_path: Path) -> None:
    hosts = ["--emulated-hosts", "2", "--rate-mbit", "1000"]
    document = compared(
        tmp_path / "result.json", *hosts, "--systems", "ddp", "--rounds", "1", "--steps", "1"
    )
    assert 0.7 < document["summary"]["link_gbit"] < 1  # loopback has ten times that


def test_help_shows_the_options_of_both_forms() -> None:
    done = run_cli("bench", "--help")
    assert done.returncode == 0
    assert "--buckets-mib" in done.stdout  # emulated durations
    assert "--precision" in done.stdout  # real models


def test_without_a_launcher_it_says_how_to_start_it() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/torch/nodes.py"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "-H node1:8,node2:8" in done.stderr


@pytest.mark.timeout(120)
def test_a_model_of_a_library_that_is_missing_names_it(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise ModuleNotFoundError(name='torchvision')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = run_cli("bench", "-np", 1, "--device", "cpu", "--models", "resnet50", env=env)
    assert done.returncode != 0
    assert "resnet50 needs torchvision; install it with: pip install torchvision" in (
        done.stdout + done.stderr
    )


spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda s: (s[0], s[0] + s[1])), max_size=8
)


@given(spans, spans)
def test_exposed_communication_is_what_a_clock_would_count(
    communication: list[tuple[int, int]], computation: list[tuple[int, int]]
) -> None:
    def busy(tick: int, kernels: list[tuple[int, int]]) -> bool:
        return any(begin <= tick < end for begin, end in kernels)

    counted = sum(busy(t, communication) and not busy(t, computation) for t in range(50))
    assert exposed_seconds(communication, computation) == counted
