"""Fixtures for the tests of hvd-order cluster run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cluster_runs import TRACE, Called, add_policies, caller


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> None:
    add_policies(monkeypatch)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(TRACE)
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Called]:
    return caller(capsys)
