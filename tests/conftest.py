"""Fixtures that all tests may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from helpers.property_cases import ALL_CASES
from helpers.ranks import RankFactory, RankPool
from helpers.shares import Share, TimesKept, read_times


def pytest_configure(config: pytest.Config) -> None:
    """Ranks have one thread each, and so has this process.

    Two threads that share a tensor on a machine with no core to spare wait for each other: 100
    steps of one process took 60 to 140 s in place of 5 to 30.
    """
    torch.set_num_threads(1)
    share = config.getoption("--share")
    if share is not None:
        which, shares = map(int, share.split("/"))
        if not 0 <= which < shares:
            raise pytest.UsageError(f"--share {share}: shares are 0/N to N-1/N")
        config.pluginmanager.register(Share(which, shares, read_times()))
    if config.getoption("--keep-times"):
        config.pluginmanager.register(TimesKept())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what `make test-long` asks for."""
    parser.addoption("--share", metavar="K/N", help="run share K, from 0, of N (helpers/shares.py)")
    parser.addoption(
        "--keep-times", action="store_true", help="put the times into tests/long_times.txt"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Property tests that try all cases take long."""
    if os.environ.get(ALL_CASES):
        for item in items:
            if "property" in item.path.parts:
                item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """The garbage collector need not look again and again at what was imported."""
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankFactory]:
    """``ranks(3)``: a pool of three processes, the same one for the whole session."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()


@pytest.fixture(scope="session")
def one_rank(ranks: RankFactory) -> RankPool:
    """A pool of one process."""
    return ranks(1)


@pytest.fixture(scope="session")
def two_ranks(ranks: RankFactory) -> RankPool:
    """A pool of two processes."""
    return ranks(2)


@pytest.fixture(scope="session")
def three_ranks(ranks: RankFactory) -> RankPool:
    """A pool of three processes."""
    return ranks(3)
