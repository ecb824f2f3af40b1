"""Names of formations in a store that keeps the keys of earlier ones, as an agent's of torchrun."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hvd_order.base.errors import TransferTimeout
from hvd_order.engine.job.formation import formation_name
from hvd_order.launch.environment import RankInfo


def info(rank: int, size: int) -> RankInfo:
    return RankInfo("torchrun", rank, size, None, None, None, None, "node0", 29500)


def names_of(
    store: dist.Store, size: int, ranks: Sequence[int], timeout_s: float,
    waits_s: Mapping[int, float] = {},
) -> dict[int, str]:  # fmt: skip
    """What each of these ranks gets, or the text of its error."""

    def one(rank: int) -> str:
        time.sleep(waits_s.get(rank, 0.0))
        try:
            return formation_name(store, info(rank, size), timedelta(seconds=timeout_s))
        except TransferTimeout as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(one, ranks), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_ranks_of_a_formation_get_one_name_that_no_other_got(seed: int) -> None:
    draw = random.Random(seed)
    store, seen = dist.HashStore(), set[str]()
    for size in (4, 2, 5, 1, 4):
        late = {rank: draw.uniform(0, 0.2) for rank in range(size)}
        names = names_of(store, size, range(size), 10.0, late)
        assert len(set(names.values())) == 1
        assert seen.isdisjoint(names.values())
        seen |= set(names.values())


def test_a_formation_that_did_not_complete_leaves_nothing_in_the_way() -> None:
    store = dist.HashStore()
    incomplete = names_of(store, 4, (0, 1, 3), 0.5)
    assert "rank 0 waited 0.5 s for ranks [2] of 4" in incomplete[0]
    for rank in (1, 3):
        assert f"rank {rank} waited 0.5 s at node0:29500 for rank 0" in incomplete[rank]
    assert len(set(names_of(store, 4, range(4), 10.0).values())) == 1


def test_without_rank_0_nobody_takes_what_an_earlier_one_left() -> None:
    store = dist.HashStore()
    names_of(store, 3, range(3), 10.0)
    assert all("for rank 0" in text for text in names_of(store, 3, (1, 2), 0.5).values())
