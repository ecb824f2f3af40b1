"""ElasticSampler: what is done stays done, on however many ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.torch.elastic import sampler as module
from hvd_order.torch.elastic.sampler import ElasticSampler


class World:
    """Stands for the job: `size` ranks, seen from one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size, self.rank = 1, 0
        monkeypatch.setattr(module, "size", lambda: self.size)
        monkeypatch.setattr(module, "rank", lambda: self.rank)

    def samplers(self, size: int, length: int, **options: bool) -> list[ElasticSampler]:
        self.size = size
        made = []
        for self.rank in range(size):
            made.append(ElasticSampler(range(length), **options))
        return made

    def load(self, samplers: list[ElasticSampler], state: dict[str, object]) -> None:
        for self.rank, sampler in enumerate(samplers):
            sampler.load_state_dict(state)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_ranks_share_an_epoch_evenly(world: World) -> None:
    samplers = world.samplers(3, 10)
    dealt = [list(sampler) for sampler in samplers]
    assert [len(part) for part in dealt] == [len(s) for s in samplers] == [4, 4, 4]
    assert set().union(*dealt) == set(range(10))
    order = list(range(10))
    random.Random(0).shuffle(order)
    assert dealt[1] == [order[1], order[4], order[7], order[0]], "Horovod's order and padding"
    assert list(world.samplers(1, 4, shuffle=False)[0]) == [0, 1, 2, 3]


def test_fewer_samples_than_ranks(world: World) -> None:
    assert [list(s) for s in world.samplers(3, 1)] == [[0], [0], [0]]
    assert [list(s) for s in world.samplers(3, 0)] == [[], [], []]


@given(
    length=st.integers(1, 60),
    batch=st.integers(1, 5),
    lives=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4),
    singly=st.booleans(),
)
def test_every_sample_is_done_once_whatever_happens(
    length: int, batch: int, lives: list[tuple[int, int]], singly: bool
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(monkeypatch)
        done: list[int] = []
        state = world.samplers(1, length)[0].state_dict()
        for size, batches in [*lives, (2, 60)]:
            samplers = world.samplers(size, length)
            world.load(samplers, state)
            left = len(samplers[0].remaining_indices)
            taken: list[int] = []
            for index in range(min(batches, -(-len(samplers[0]) // batch))):
                for sampler in samplers:
                    mine = sampler.get_indices(index, batch)
                    taken += mine
                    if singly and size > 1:
                        for each in samplers:  # what commit() brings together
                            each.record_indices(mine)
                    else:
                        sampler.record_batch(index, batch)
            assert len(set(taken)) >= min(left, len(taken)), "only padding comes twice"
            assert not set(taken) & set(done)
            done += set(taken)
            state = samplers[0].state_dict()
            assert all(sampler.state_dict() == state for sampler in samplers)
        assert sorted(done) == list(range(length))


def test_a_new_epoch_starts_over_in_another_order(world: World) -> None:
    (sampler,) = world.samplers(1, 20)
    first = list(sampler)
    sampler.record_batch(0, 10)
    sampler.set_epoch(1)
    assert sampler.epoch == 1
    assert sorted(sampler) == sorted(first)
    assert list(sampler) != first
