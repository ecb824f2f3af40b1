"""Messages of hvd_order in a program with and without logging of its own."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

SAYS = """
import logging
from hvd_order.base import log
{setting}
log.begin({level!r})
log.set_rank(3)
for level in ("debug", "info", "warning"):
    getattr(logging.getLogger("hvd_order"), level)("a %s", level)
"""


def said(level: str | None, setting: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SAYS.format(level=level, setting=setting)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("level", "words"),
    [(None, ["warning"]), ("info", ["info", "warning"]), ("error", [])],
)
def test_a_message_has_time_rank_and_level(level: str | None, words: list[str]) -> None:
    lines = said(level)
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert re.fullmatch(rf"hvd_order \d\d:\d\d:\d\d rank 3 {word}: a {word}", line), line


def test_a_program_s_own_logging_gets_each_message_once() -> None:
    basic = "logging.basicConfig(format='own %(message)s')"
    assert said("debug", basic) == ["own a debug", "own a info", "own a warning"]
    assert said(None, basic) == ["own a warning"]
