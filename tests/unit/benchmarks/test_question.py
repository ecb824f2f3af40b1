"""Options have the types of their defaults, and a run that fails keeps its file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.runner.question import Answer, ask, option  # noqa: E402

OPTIONS = (
    option("--rounds", 7, "turns"),
    option("--rates", [1.0, 2.0]),
    option("--alike", False),
    option("--model", "a", choices=["a", "b"]),
)


def asked(out: Path, *arguments: str, failed: str = "") -> tuple[int, dict[str, Any]]:
    """The exit status, and the settings of the result file."""

    def measure(options: argparse.Namespace) -> Answer:
        return Answer({"seconds": [0.1]}, {"median": 0.1}, {"model": "named"}, failed)

    code = ask(
        "trial", __doc__, measure, *OPTIONS, quick={"rounds": 1},
        argv=[*arguments, "--out", str(out)],
    )  # fmt: skip
    document = json.loads(out.read_text("utf-8"))
    assert document["benchmark"] == "trial"
    assert document["raw"] == {"seconds": [0.1]}
    settings: dict[str, Any] = document["settings"]
    return code, settings


def test_options_are_read_by_the_types_of_their_defaults(tmp_path: Path) -> None:
    out = tmp_path / "trial.json"
    usual = {"rounds": 7, "rates": [1.0, 2.0], "alike": False, "model": "named", "quick": False}
    assert asked(out) == (0, usual)
    arguments = ("--rounds", "3", "--rates", "4", "--alike")
    assert asked(out, *arguments) == (0, {**usual, "rounds": 3, "rates": [4.0], "alike": True})


def test_the_shortest_form_sets_its_options(tmp_path: Path) -> None:
    _, settings = asked(tmp_path / "trial.json", "--quick")
    assert (settings["rounds"], settings["quick"]) == (1, True)


def test_a_run_that_fails_keeps_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = asked(tmp_path / "trial.json", failed="wrong sums")
    assert code == 1
    assert "FAILED: wrong sums" in capsys.readouterr().err
