"""Fixtures that all tests may use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from zlib import crc32

import pytest
import torch
from helpers.ranks import RankFactory, RankPool


def pytest_configure() -> None:
    """Ranks have one thread each, and so has this process.

    Two threads that share a tensor on a machine with no core to spare wait for each other: 100
    steps of one process took 60 to 140 s in place of 5 to 30.
    """
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--share``, with which several runs together run every test."""
    parser.addoption(
        "--share",
        metavar="K/N",
        help="run share K, from 0, of N shares; the share of a test follows from its name",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of the share that is asked for."""
    share = config.getoption("--share")
    if share is None:
        return
    wanted, shares = map(int, share.split("/"))
    others = [item for item in items if crc32(item.nodeid.encode()) % shares != wanted]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]


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
