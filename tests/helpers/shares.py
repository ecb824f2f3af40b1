"""Shares of the tests that take long: N runs, one for each of N changes, have run every test.

The tests whose times are on file are packed into shares of about the same time. The share of any
other follows from its name: it takes little time, or is new.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from zlib import crc32

import pytest

TIMES = Path(__file__).parents[1] / "long_times.txt"
"""A line for each test that takes long: seconds, and its node id."""

LIMIT_S = 600.0
"""The most time that a share may take."""

_KEPT_S = 5.0  # a shorter test is not worth a line
_TOLD = 5  # tests that the error names


def read_times(file: Path = TIMES) -> dict[str, float]:
    """The seconds of the tests that are on file, by node id."""
    if not file.exists():
        return {}
    rows = (line.split(" ", 1) for line in file.read_text("utf-8").splitlines())
    return {test: float(seconds) for seconds, test in rows}


def write_times(measured: Mapping[str, float], file: Path = TIMES) -> None:
    """Puts what was measured into the file; other tests keep their lines."""
    times = {**read_times(file), **measured}
    rows = [f"{seconds:.0f} {test}\n" for test, seconds in times.items() if seconds >= _KEPT_S]
    file.write_text("".join(sorted(rows, key=lambda row: row.split(" ", 1)[1])), "utf-8")


def shares_of(tests: Iterable[str], times: Mapping[str, float], shares: int) -> dict[str, int]:
    """The share, from 0, of each test. The longest comes first, into the share with least time."""
    loads = [0.0] * shares
    found = {}
    for test in sorted(tests, key=lambda test: (-times.get(test, 0.0), test)):
        if test in times:
            found[test] = min(range(shares), key=lambda share: loads[share])
            loads[found[test]] += times[test]
        else:
            found[test] = crc32(test.encode()) % shares
    return found


class Share:
    """A plugin that runs one share and ends it in time: a test that it does not reach fails."""

    def __init__(
        self, which: int, shares: int, times: Mapping[str, float], limit_s: float = LIMIT_S
    ) -> None:
        """``which``: from 0."""
        self._which, self._shares = which, shares
        self._times = times
        self._limit_s = limit_s
        self._end_s = 0.0
        self._took: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)  # of those that -m leaves
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keeps the tests of this share."""
        share = shares_of((item.nodeid for item in items), self._times, self._shares)
        others = [item for item in items if share[item.nodeid] != self._which]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if share[item.nodeid] == self._which]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        """Begins the time of the share: all tests have been found."""
        self._end_s = time.monotonic() + self._limit_s

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before that of pytest-timeout
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Gives a test no more time than the share has left."""
        own = item.get_closest_marker("timeout")
        own_s = own.args[0] if own is not None else float(item.config.getini("timeout"))
        left_s = max(1.0, self._end_s - time.monotonic())
        item.add_marker(pytest.mark.timeout(min(own_s, left_s)), append=False)
        return (yield)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fails where no time is left."""
        if time.monotonic() > self._end_s:
            longest = ", ".join(f"{test} {s:.0f} s" for test, s in self._took.most_common(_TOLD))
            pytest.fail(
                f"share {self._which} of {self._shares} takes more than {self._limit_s:g} s, so "
                f"this test was not run. The longest: {longest}. Make those shorter, or more "
                "shares (SHARES in the Makefile), and note the times (tests/README.md)",
                pytrace=False,
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up the time of each test."""
        self._took[report.nodeid] += report.duration


class TimesKept:
    """A plugin that puts the times of the tests that pass into the file."""

    def __init__(self) -> None:
        """Begins with none."""
        self._took: Counter[str] = Counter()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up the time of each test."""
        self._took[report.nodeid] += report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Writes them."""
        write_times({test: s for test, s in self._took.items() if test not in self._failed})
