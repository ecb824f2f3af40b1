"""Samples that single ranks record, on ranks: no commit, change of the job or sync loses one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool

import hvd_order.torch as hvd
from hvd_order.base.errors import HostsUpdatedInterrupt
from hvd_order.launch.elastic import run as loop
from hvd_order.launch.elastic.state import ObjectState


def states() -> tuple[hvd.elastic.ElasticSampler, hvd.elastic.TorchState]:
    sampler = hvd.elastic.ElasticSampler(range(16), shuffle=False)
    return sampler, hvd.elastic.TorchState(sampler=sampler)


def body_only_rank_0_records() -> list[Any]:
    """The other ranks' first collective after the commit is another one of the same kind."""
    sampler, state = states()
    sampler.record_indices([0, 2] if hvd.rank() == 0 else [])
    state.commit()
    return [sampler.processed_indices, hvd.allgather_object(hvd.rank()), len(sampler.indices)]


def body_interrupted(folder: str) -> list[Any]:
    """The loop around training keeps what was done until the interrupt."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HVD_ORDER_ELASTIC_DIR", folder)
        environment.setenv("TORCHELASTIC_RUN_ID", "x")
        environment.setattr(loop, "_CHANGE_WAIT_S", 0.0)  # for the signal of an agent
        sampler, state = states()

        def train(state: Any) -> None:
            sampler.record_indices([hvd.rank()])
            state.commit()
            sampler.record_indices([4 + hvd.rank()])
            if hvd.rank() == 1:
                state.on_hosts_updated(1.0, 2)
            state.check_host_updates()

        with pytest.raises(HostsUpdatedInterrupt):
            loop.run_fn(train, lambda: None)(state)
        hvd.barrier()  # rank 0 has written
        again, other = states()
        number = other.recover()
        other.sync()
        return [number, again.processed_indices, sorted(again.remaining_indices)]


def body_restored_and_synced() -> list[Any]:
    """What `save` has kept comes back everywhere; what was recorded since, a sync collects."""
    sampler, state = states()
    sampler.record_indices([hvd.rank()])
    state.save()
    sampler.record_indices([4 + hvd.rank()])
    state.restore()
    restored = set(sampler.processed_indices)
    sampler.record_indices([8 + hvd.rank()])
    state.sync()
    synced = set(sampler.processed_indices)
    if hvd.rank() == 1:  # of an epoch that rank 0 has not begun
        sampler.set_epoch(1)
        sampler.record_indices([15])
    state.sync()
    return [restored, synced, sampler.epoch, sampler.processed_indices, sampler.indices]


def body_objects_that_only_a_commit_has() -> list[int]:
    """The commit that rank 0 has found has an object that this program does not name."""
    model = torch.nn.Linear(1, 1)
    state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if hvd.rank() == 0:
        ObjectState.set_saved(state, {"epoch": 3})
    state.sync()
    return [state.epoch, *hvd.allgather_object(hvd.rank())]


def test_a_commit_has_the_samples_of_all_ranks(two_ranks: RankPool) -> None:
    assert two_ranks.run(body_only_rank_0_records) == [[{0, 2}, [0, 1], 8]] * 2


def test_what_an_interrupt_keeps_has_the_samples_of_all_ranks(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    done = {0, 1, 4, 5}
    assert (
        two_ranks.run(body_interrupted, str(tmp_path))
        == [[2, done, [i for i in range(16) if i not in done]]] * 2
    )


def test_restore_and_sync_deal_the_same_rest_to_all_ranks(two_ranks: RankPool) -> None:
    results = two_ranks.run(body_restored_and_synced)
    rest = [i for i in range(16) if i not in {0, 1, 8, 9}]
    for rank, (restored, synced, epoch, processed, indices) in enumerate(results):
        assert restored == {0, 1}
        assert synced == {0, 1, 8, 9}
        assert (epoch, processed) == (0, {0, 1, 8, 9})
        assert indices == rest[rank::2]


def test_a_sync_sends_objects_that_only_rank_0_has(two_ranks: RankPool) -> None:
    assert two_ranks.run(body_objects_that_only_a_commit_has) == [[3, 0, 1]] * 2
