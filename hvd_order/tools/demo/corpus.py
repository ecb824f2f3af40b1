"""Training text that every machine has: the source files of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hvd_order.base.errors import InvalidUsage

VOCABULARY = 256
"""Tokens are bytes, so there is nothing to train and nothing to store."""

_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)
_VALIDATION_EVERY = 20  # one file in twenty is never trained on


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to validate on; no file is in both.

    Attributes:
        train: uint8, shape [bytes].
        validation: uint8, shape [bytes].
        files: how many files were read.
    """

    train: Tensor
    validation: Tensor
    files: int


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Source files below ``root`` in an order that depends on their names only.

    Args:
        root: folder to search; the running interpreter's standard library by default.

    Raises:
        InvalidUsage: there are fewer than 20 source files, too few to set any aside.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    named = ((path.relative_to(folder), path) for path in folder.rglob("*.py"))
    kept = sorted(
        (relative.as_posix(), path)
        for relative, path in named
        if _LEFT_OUT.isdisjoint(relative.parts)
    )
    if len(kept) < _VALIDATION_EVERY:
        raise InvalidUsage(
            f"the demo's text needs at least {_VALIDATION_EVERY} Python source files below "
            f"{folder}, found {len(kept)}; use a Python that is installed with its sources"
        )
    return [path for _, path in kept]


def load_corpus(root: Path | None = None) -> Corpus:
    """Reads the text; the same interpreter gives the same bytes on every rank and every run.

    Raises:
        InvalidUsage: too few source files, see ``standard_library_files``.
    """
    files = standard_library_files(root)
    train = bytearray()
    validation = bytearray()
    for number, path in enumerate(files):
        part = validation if number % _VALIDATION_EVERY == 0 else train
        part += path.read_bytes()
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        validation=torch.frombuffer(validation, dtype=torch.uint8),
        files=len(files),
    )


def shard(rows: Sequence[int], rank: int, size: int) -> Sequence[int]:
    """The part of a batch that one rank works on; the ranks' parts cover it without overlap.

    Raises:
        InvalidUsage: the batch cannot be shared out evenly. Parts of different size would make
            the mean of the ranks' mean gradients differ from the gradient of the whole batch.
    """
    if len(rows) % size:
        raise InvalidUsage(
            f"a batch of {len(rows)} sequences cannot be shared evenly by {size} ranks; "
            "use a multiple of the number of ranks"
        )
    share = len(rows) // size
    return rows[rank * share : (rank + 1) * share]


class Batches:
    """Cuts text into sequences and says which of them each step of training reads.

    Each sequence is read once an epoch, in an order drawn from ``seed`` and the epoch alone, so
    every rank knows every batch without asking.

    Args:
        text: uint8, shape [bytes].
        context: tokens the model sees of a sequence.
        batch: sequences in a batch, all ranks together.
        seed: draws the order of the sequences.

    Raises:
        InvalidUsage: the text is too short for one batch.
    """

    def __init__(self, text: Tensor, *, context: int, batch: int, seed: int) -> None:
        count = (text.numel() - 1) // context
        self._batches_an_epoch = count // batch
        if self._batches_an_epoch == 0:
            raise InvalidUsage(
                f"a batch of {batch} sequences of {context} bytes needs "
                f"{batch * context + 1} bytes of text, got {text.numel()}"
            )
        self._text = text
        self._context = context
        self._batch = batch
        self._seed = seed
        self._sequences = count
        self._epoch = -1
        self._order: list[int] = []

    def rows(self, step: int) -> list[int]:
        """Numbers of the sequences in the batch of ``step``, all ranks together."""
        epoch, place = divmod(step, self._batches_an_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = torch.randperm(self._sequences, generator=generator).tolist()
            self._epoch = epoch
        return self._order[place * self._batch : (place + 1) * self._batch]

    def take(self, step: int, *, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """One rank's inputs and targets for ``step``: int64, shape [sequences, context] each.

        Raises:
            InvalidUsage: the batch cannot be shared out evenly.
        """
        starts = [row * self._context for row in shard(self.rows(step), rank, size)]
        pieces = [self._text[start : start + self._context + 1] for start in starts]
        tokens = torch.stack(pieces).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
