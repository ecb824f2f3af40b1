"""Checks, rarely, that ranks that should be equal are equal: after steps 1, 2, 4, 8, ...

Averaging keeps ranks equal only if they began equal. If the parameters were not broadcast, or one
rank's optimizer has another learning rate, every rank trains its own model with the other ranks'
gradients, without an error. So the ranks exchange a checksum (checksum.py) of the parameters after
these steps, and the settings of their optimizers. In n steps that happens log2(n) times, and reads
the parameters once each time.

While updates are deferred, the parameters are up to date only when the next step's gradients come.
They are read then, and the ranks compare at the end of that step: after steps 1, 2, 5, 9, 17, ...
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from hvd_order.base.errors import RanksDiffer
from hvd_order.base.same_model import check_same_optimizer, first_difference
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.torch.parameters.entry_table import EntryTable
from hvd_order.torch.rank_check.checksum import checksums
from hvd_order.torch.updates import optimizer_facts

__all__: list[str] = []


@dataclass(frozen=True)
class _Facts:
    """One rank's facts for the comparison.

    Attributes:
        steps: number of steps taken at the time.
        settings: of the optimizer, see `optimizer_facts`.
        parameters: by name, the memory layout and the checksum.
    """

    steps: int
    settings: dict[str, str]
    parameters: dict[str, tuple[object, int]]

    def digest(self) -> bytes:
        """Equal for equal facts, independent of the order of a rank's parameters."""
        text = repr((sorted(self.settings.items()), sorted(self.parameters.items())))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


class RankCheck:
    """The comparison for one optimizer; the exchange's lock is held in all methods.

    Ranks that take no common steps (asynchronous parameter servers) differ by design, and are never
    compared.
    """

    def __init__(self, channel: ModelChannel, optimizer: Optimizer, table: EntryTable) -> None:
        """Collective: compares the optimizers' classes.

        Hyper-parameters are not compared yet: a checkpoint may be loaded on one rank and broadcast
        after this.

        Raises:
            RanksDiffer: the classes differ; on every rank.
        """
        host = channel.host
        config = host.job.config
        self._channel = channel
        self._host = host
        self._optimizer = weakref.ref(optimizer)
        self._table = table
        self._steps = 0
        self._facts: _Facts | None = None  # of the step that goes on, where ranks talk at its end
        self._talks = host.choice.in_step
        self._compares = config.check_ranks and self._talks
        if self._compares:
            settings = channel.gather("its class", optimizer_facts.class_of(optimizer))
            check_same_optimizer(dict(zip(host.ranks, settings, strict=True)))

    @property
    def talks_next(self) -> bool:
        """Whether the ranks compare after the step that begins."""
        return self._talks and _talk(self._steps + 1)

    def begin_step(self) -> None:
        """Handles the first gradients of a further step: every earlier update has been applied."""
        if self._compares and self._facts is None and self._steps >= 2 and _talk(self._steps + 1):
            self._facts = self._look(self._steps)

    def step_taken(self, extra: object = None, absent: bool = False) -> list[Any] | None:
        """Handles the end of a step. Collective after the steps at which the ranks compare.

        Args:
            extra: what this rank sends to the other ranks, whether or not they are compared.
            absent: this rank has joined: its parameters are no longer trained.

        Returns:
            The `extra` of every rank, by place in the set, after steps at which the ranks compare.

        Raises:
            RanksDiffer: parameters or hyper-parameters differ; on every rank.
        """
        self._steps += 1
        facts, self._facts = self._facts, None
        if not self._talks or not _talk(self._steps):
            return None
        if absent:
            facts = None
        elif self._compares and self._steps <= 2:  # updated in step() itself
            facts = self._look(self._steps)
        told = self._channel.gather("its parameters' sums", (facts and facts.digest(), extra))
        if len({digest for digest, _ in told} - {None}) > 1:
            self._find_difference(self._channel.gather("what differs", facts))
        return [each for _, each in told]

    def _look(self, steps: int) -> _Facts | None:
        optimizer = self._optimizer()
        if optimizer is None:  # dropped, with parameters that still get gradients
            return None
        entries = self._table.everything
        sums = checksums([entry.parameter for entry in entries])
        return _Facts(
            steps,
            {**optimizer_facts.class_of(optimizer), **optimizer_facts.hyper_parameters(optimizer)},
            {entry.name: value for entry, value in zip(entries, sums, strict=True)},
        )

    def _find_difference(self, everyone: list[_Facts | None]) -> None:
        present = {
            rank: facts
            for rank, facts in zip(self._host.ranks, everyone, strict=True)
            if facts is not None
        }
        check_same_optimizer({rank: facts.settings for rank, facts in present.items()})
        # Frozen parameters may differ between ranks, in number and in memory layout.
        steps, first = next((facts.steps, facts.parameters) for facts in present.values())
        shared = {
            name
            for name, (order, _) in first.items()
            if all(facts.parameters.get(name, (..., 0))[0] == order for facts in present.values())
        }
        difference = first_difference({
            rank: {name: value for name, value in facts.parameters.items() if name in shared}
            for rank, facts in present.items()
        })  # fmt: skip
        if difference is not None:
            name, sides = difference
            raise RanksDiffer(
                f"the ranks have different parameters after step {steps}: the first is "
                f"'{name}', which has one value on {', another on '.join(sides.values())}. Call "
                "broadcast_parameters(model.state_dict(), root_rank=0) and "
                "broadcast_optimizer_state(optimizer, root_rank=0) before the first step, and "
                "change parameters in the same way on every rank. (Ranks on processors of "
                "different kinds may round differently; HVD_ORDER_CHECK_RANKS=0 ends these checks.)"
            )


def _talk(step: int) -> bool:
    """Whether the ranks compare after the step: 1, 2, 5, 9, 17, ..."""
    return step == 1 or step == 2 or (step > 4 and (step - 1) & (step - 2) == 0)
