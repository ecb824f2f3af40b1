"""A sampler that tracks the processed samples of the epoch, for any number of ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from hvd_order.engine.job.process import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Distributes a dataset over the ranks, and redistributes the rest when the job has changed.

    Put it into the `TorchState`, call `record_batch` after each batch and `set_epoch` at the end
    of each epoch. As in Horovod 0.28.1, samples are dealt in turn: after k batches on n ranks, the
    first k * batch_size * n of the epoch's order are processed.

    Args:
        dataset: of constant size.
        shuffle: a new order each epoch, the same on all ranks.
        seed: of the order; the same on all ranks.

    Attributes:
        epoch: the current epoch.
        processed_num: number of processed samples at the front of the epoch's order.
        processed_indices: further processed samples, see `record_indices`.
        remaining_indices: samples that were left, in order, when the job last formed.
        num_replicas, rank: number of ranks, and this rank.
        num_samples: number of remaining samples for this rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch; call it at the end of the previous epoch, not at the beginning.

        A job that forms anew calls its training function again, and would lose its progress.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that every rank has processed a batch of `batch_size` samples."""
        self._passed += batch_size * self.num_replicas
        if self._positions is None:
            self.processed_num += batch_size * self.num_replicas
        elif self._passed < len(self._positions):
            self.processed_num = self._positions[self._passed]
        else:
            self.processed_num = len(self.dataset)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Records samples that this rank has processed, for batches that are not taken in order.

        ``commit()``, ``save()`` and ``sync()`` of the `TorchState` merge the records of all ranks,
        so every rank must call them. Every index is kept, and stored with each commit:
        `record_batch` is cheaper.
        """
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples in batch `batch_idx` of the current iteration."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The progress in the epoch; independent of the number of ranks."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": set(self.processed_indices),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the progress and distributes the remaining samples."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Distributes the remaining samples over the current ranks."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self._passed = 0  # of the remaining samples, over all ranks
        self._positions: list[int] | None = None  # of the remaining, in `order`; None: all behind
        if self.processed_indices:
            self._positions = [
                position
                for position in range(self.processed_num, len(order))
                if order[position] not in self.processed_indices
            ]
            self.remaining_indices = [order[position] for position in self._positions]
        else:
            self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices = self._dealt()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples

    def _dealt(self) -> list[int]:
        """This rank's samples; the first ones are repeated if the last round would be short."""
        endless = itertools.cycle(self.remaining_indices)
        even = list(itertools.islice(endless, self.total_size))
        return even[self.rank :: self.num_replicas]
