"""The command that a user is told to build the engine with is the one for this installation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hvd_order._native.requirements import build_command

AGAIN = "pip install --force-reinstall --no-deps "


@pytest.mark.parametrize(
    ("came_from", "command"),
    [
        (None, AGAIN + "--no-binary hvd_order hvd_order"),
        ({"url": "file:///home/me/my%20code", "dir_info": {}}, AGAIN + "'/home/me/my code'"),
        (
            {"url": "https://x.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "a1"}},
            AGAIN + "git+https://x.org/r.git@a1",
        ),
        (
            {"url": "file:///d/hvd_order-0.1.0.tar.gz", "archive_info": {}},
            AGAIN + "file:///d/hvd_order-0.1.0.tar.gz",
        ),
    ],
)
def test_of_what_pip_has_noted(came_from: dict[str, Any] | None, command: str) -> None:
    assert build_command(came_from and json.dumps(came_from)) == command


def test_a_wheel_is_no_source() -> None:
    told = build_command(json.dumps({"url": "file:///d/hvd_order-0.1.0.whl", "archive_info": {}}))
    assert "source distribution" in told
