"""Updates of this rank's shards by the user's own optimizer (ZeRO stage 1).

Source: Rajbhandari et al., ZeRO (SC 2020), section 5.1: optimizer states are partitioned; each rank
updates its partition, and an all-gather distributes the parameters.

Between the halves of a split all-reduce, a rank has the sums of its shards. The optimizer sees each
piece of a parameter in a shard as a 1-d parameter of its own. So its state exists once over all
ranks. Parameters of 16 bits have a float32 master copy in the shard. If the program changes such a
parameter between steps, the copy follows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.shards.piece import Piece, in_wire_order
from hvd_order.torch.shards.shard_state import MASTER
from hvd_order.torch.updates import partial_step
from hvd_order.torch.updates.first_state import first_state

__all__: list[str] = []


class ShardUpdate:
    """The shards of one optimizer.

    Attributes:
        pieces: of this rank.
        state: the optimizer's state, by `Piece.values`.
    """

    def __init__(self, step: partial_step.InnerStep) -> None:
        """Starts without pieces.

        Args:
            step: the ``step`` of the user's class.
        """
        self.pieces: Sequence[Piece] = ()
        self.state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._step = step
        self._by_entry: dict[ParameterEntry, list[Piece]] = {}

    def take(self, pieces: Sequence[Piece], state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Replaces pieces and state."""
        self.pieces = pieces
        self.state = defaultdict(dict, state)
        self._by_entry = {}
        for piece in pieces:
            self._by_entry.setdefault(piece.entry, []).append(piece)

    def forget(self) -> None:
        """Drops all state; master copies begin with the parameters again."""
        self.state.clear()
        for piece in self.pieces:
            if piece.has_master:
                piece.values.data.fill_(torch.nan)
                piece.has_master = False

    def with_masters(self, optimizer: Optimizer, begun: bool) -> dict[Piece, dict[str, Any]]:
        """The state of each piece that has any, with master copies under `MASTER`.

        Args:
            begun: there is state; if not, it is that of `first_state`, and not kept here.
        """
        make = first_state(optimizer, self._step)
        found = {}
        with torch.no_grad():
            for piece, elements in zip(self.pieces, _elements(self.pieces), strict=True):
                if piece.is_master and not piece.has_master:
                    master = elements.float()
                else:
                    master = piece.values.data
                if begun:
                    values = dict(self.state.get(piece.values, {}))
                else:
                    values = make(piece.entry.parameter, master if piece.is_master else elements)
                if piece.is_master and (values or piece.has_master or not begun):
                    values[MASTER] = master
                if values:
                    found[piece] = values
        return found

    def replace(self, state: Mapping[Piece, dict[str, Any]]) -> None:
        """Replaces all state by one as `with_masters` returns it."""
        self.state.clear()
        for piece in self.pieces:
            values = dict(state.get(piece, {}))
            master = values.pop(MASTER, None)
            if values:
                self.state[piece.values] = values
            if piece.is_master and master is not None:
                piece.values.data = master
            elif piece.has_master:
                piece.values.data.fill_(torch.nan)
            piece.has_master = piece.is_master and master is not None

    def update(
        self, optimizer: Optimizer, entries: Iterable[ParameterEntry], factor: float
    ) -> None:
        """Updates the pieces of the entries, whose sums are in the buffer, and leaves the new
        elements there.

        Args:
            optimizer: whose groups have the hyper-parameters.
            entries: those of unused parameters are left out.
            factor: of all sums.
        """
        due = [piece for entry in entries if entry.used for piece in self._by_entry.get(entry, ())]
        if not due:
            return
        with torch.no_grad():
            for piece, elements in zip(due, _elements(due), strict=True):
                _lend(piece, elements, factor)
        self._step(self._optimizer_of(optimizer, due))
        with torch.no_grad():
            torch._foreach_copy_([each.wire for each in due], [each.values for each in due])
            for piece in due:
                piece.values.grad = None
                if not piece.is_master:
                    piece.values.data = piece.wire.new_empty(0)

    def _optimizer_of(self, optimizer: Optimizer, due: Sequence[Piece]) -> Optimizer:
        members: dict[int, list[torch.Tensor]] = {}
        for piece in due:
            members.setdefault(id(piece.entry.parameter), []).append(piece.values)
        groups = [
            {**group, "params": [v for p in group["params"] for v in members.get(id(p), ())]}
            for group in optimizer.param_groups
        ]
        return partial_step.with_groups(
            optimizer, [group for group in groups if group["params"]], state=self.state
        )


def _elements(due: Sequence[Piece]) -> Iterable[torch.Tensor]:
    """The present elements of each piece; where possible, a view of the parameter."""
    entry: ParameterEntry | None = None
    for piece in due:
        if piece.entry is not entry:
            entry = piece.entry
            flat = in_wire_order(entry.parameter.detach(), entry.wire)
        yield flat[piece.begin : piece.end]


def _lend(piece: Piece, elements: torch.Tensor, factor: float) -> None:
    """Gives the piece its elements and its gradient, with the changes made to that."""
    gradient = piece.wire
    if piece.is_master:
        changed = piece.values.to(elements.dtype) != elements
        piece.values.copy_(torch.where(changed, elements.float(), piece.values))
        piece.has_master = True
        gradient = gradient.float()
    else:
        piece.values.data = elements
    if factor != 1.0:
        gradient.mul_(factor)
    for change in piece.entry.changes:
        change.apply(gradient)
    piece.values.grad = gradient


def copy_arrived_parameters(optimizer: Optimizer, closure: Any = None) -> Any:
    """The inner step once all shards are updated: copies the parameters that have arrived."""
    if closure is not None:
        raise InvalidUsage(
            "sharded=True updates shards once a step, but this optimizer may evaluate its closure "
            "more than once: evaluate it before step()"
        )
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        pairs = [
            (parameter, parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if pairs:
            parameters, answers = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(parameters, answers)
