"""Shares of the tests that take long: which test is in which, and the end of one that is late."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import REPOSITORY
from helpers.shares import LIMIT_S, read_times, shares_of, write_times

TIMES = {"a": 300.0, "b": 200.0, "c": 150.0, "d": 100.0, "e": 50.0}


def test_each_test_has_one_share_and_shares_take_equally_long() -> None:
    short = [f"short{i}" for i in range(50)]
    shares = shares_of([*short, *TIMES], TIMES, 2)
    assert set(shares) == {*short, *TIMES}
    loads = [sum(s for test, s in TIMES.items() if shares[test] == share) for share in (0, 1)]
    assert loads == [400.0, 400.0]
    assert all(any(shares[test] == share for test in short) for share in (0, 1))


def test_the_share_of_a_test_does_not_hang_on_the_order_or_on_other_short_tests() -> None:
    all_tests = shares_of(["x", "y", *TIMES], TIMES, 3)
    assert shares_of(reversed([*TIMES, "y"]), TIMES, 3) == {
        test: share for test, share in all_tests.items() if test != "x"
    }


def test_times_are_added_to_those_on_file(tmp_path: Path) -> None:
    file = tmp_path / "times.txt"
    assert read_times(file) == {}
    write_times({"b::test[x y]": 7.4, "c": 30.0, "short": 0.1}, file)
    write_times({"a": 12.0, "c": 2.0}, file)
    assert file.read_text("utf-8") == "12 a\n7 b::test[x y]\n"


def test_the_shares_of_make_test_long_take_ten_minutes_at_most() -> None:
    times = read_times()
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    number = int(makefile.split("\nSHARES := ")[1].split("\n")[0])
    shares = shares_of(times, times, number)
    loads = [0.0] * number
    for test, share in shares.items():
        loads[share] += times[test]
    assert max(loads) < 0.8 * LIMIT_S  # short tests and the start come on top


PROGRAM = """
import time
import pytest

def test_first():
    pass

@pytest.mark.timeout(100)
def test_takes_long():
    time.sleep(60)

def test_comes_too_late():
    pass
"""
CONFTEST = """
from helpers.shares import Share

def pytest_configure(config):
    config.pluginmanager.register(Share(0, 1, {}, limit_s=2.0))
"""


def test_a_share_that_takes_too_long_fails_and_names_the_tests(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 50\n")
    (tmp_path / "test_program.py").write_text(PROGRAM)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "tests")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "test_first PASSED" in done.stdout
    assert "test_takes_long FAILED" in done.stdout
    assert "Timeout (>" in done.stdout
    assert "test_comes_too_late ERROR" in done.stdout
    assert "share 0 of 1 takes more than 2 s, so this test was not run" in done.stdout
    assert "The longest: test_program.py::test_takes_long " in done.stdout
