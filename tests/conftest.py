"""Fixtures that all tests may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.ranks import RankFactory, RankPool


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
