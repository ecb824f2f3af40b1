"""Sums of which this rank uses its shards: it updates them, and parameters travel on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from hvd_order._native import _torch as native
from hvd_order.base.errors import InvalidUsage
from hvd_order.engine import timeline
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.read_guard import Guard, disarm_gradient
from hvd_order.torch.shards import elementwise
from hvd_order.torch.shards.model_shards import ModelShards, NamedGather, require_halves
from hvd_order.torch.shards.shard_update import copy_arrived_parameters
from hvd_order.torch.sums.sum_use import Model, Step, SumUse, refuse_resized
from hvd_order.torch.updates.partial_step import InnerStep
from hvd_order.torch.updates.separability import Separability

__all__: list[str] = []


class ShardSums(SumUse):
    """The use with ``sharded=True``. `update` runs the optimizer, `step` copies parameters."""

    in_halves = True
    shards: ModelShards

    def __init__(
        self,
        optimizer: Optimizer,
        step: InnerStep,
        verdict: Separability,
        channel: ModelChannel,
        gather: NamedGather,
        entries: Sequence[ParameterEntry],
        factor: float,
    ) -> None:
        """Collective.

        Args:
            verdict: whether updates may be deferred.
            gather: for the methods that a rank may call when others do not.
            entries: the trainable parameters.
            factor: of all sums.

        Raises:
            InvalidUsage: the optimizer, the gradients or the transport cannot be sharded.
        """
        elementwise.require(optimizer, type(optimizer), step, verdict)
        super().__init__(copy_arrived_parameters)
        self.shards = ModelShards(optimizer, step, channel, gather, entries)
        self._rank = channel.host.job.rank
        self._factor = factor
        self._updated = False  # in this step: what arrives are parameters

    @property
    def is_readable(self) -> bool:
        """False: a rank never has a whole sum."""
        return False

    def check_entries(
        self, entries: Sequence[ParameterEntry], before: Sequence[ParameterEntry]
    ) -> None:
        """See `SumUse`."""
        require_halves([entry.parameter for entry in entries])
        refuse_resized(before, "sharded=True")

    def lay_out(
        self,
        entries: Sequence[ParameterEntry],
        buffers: Sequence[torch.Tensor],
        layout: native.SliceLayout,
        observed: bool,
    ) -> None:
        """Moves the state to the ranks that now have its elements."""
        del observed
        self.shards.move(entries, buffers, layout)

    # ---- a step -------------------------------------------------------------------------------

    def begin_step(self, entries: Sequence[ParameterEntry]) -> None:
        """Makes gradients ordinary, which were armed since the step before."""
        self._updated = False
        for entry in entries:
            entry.unlock_gradient()
            disarm_gradient(entry.gradient)

    def synchronize(self, step: Step, guard: Guard) -> None:
        """Gives every parameter that any rank has used a gradient in flight."""
        step.show_all(guard)

    def update(
        self, optimizer: Optimizer, model: Model, step: Step, streams: native.HomeStreams
    ) -> bool:
        """Updates this rank's shards as their sums arrive, and sends the parameters."""
        if step.replaced():
            raise InvalidUsage(
                "with sharded=True the sums of gradients cannot be replaced by other tensors, or "
                "by None, between backward() and step(); leave sharded out"
            )
        for entry in model.find_used():
            # What has clipped here did not see it, and did elsewhere.
            if step.used_in_flight and entry.parameter.grad is None:
                self._refuse_clipped_without(entry.name)
        with torch._C.DisableTorchFunctionSubclass(), native.OnHomeStreams(streams):
            self._update(optimizer, model, step)
        return True

    def _update(self, optimizer: Optimizer, model: Model, step: Step) -> None:
        pending = list(model.entries)
        while pending:
            taken = model.gradients.can_be_taken()
            due = [entry for entry in pending if taken(entry)]
            if not due:  # about the one that comes first
                place = model.gradients.place_of(pending[-1])
                with timeline.span("wait", pending[-1].name, **place):
                    model.gradients.wait(pending[-1])
                continue
            for entry in due:
                model.gradients.wait(entry)
            step.check_not_given_up(due)  # the rank whose part has the flag
            with timeline.span("update", "update", tensors=len(due)):
                self.shards.update(optimizer, due, self._factor)
            for entry in due:
                model.parameters.mark_ready(entry)
            pending = [entry for entry in pending if not taken(entry)]
        self._updated = True
        model.arriving = model.parameters

    def are_gradients(self, arrived: Sequence[ParameterEntry]) -> bool:
        """False: half a sum, or a parameter. Uses of it still call the guard."""
        if self._updated:
            native.unlock_gradients(arrived)  # the parameter is copied from there
        return False

    def end_step(self, entries: Sequence[ParameterEntry]) -> None:
        """Sets ``.grad`` to None: what its memory has, or will have, is no gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            for entry in entries:
                if entry.parameter.grad is entry.gradient:  # else it is that of a next pass
                    entry.parameter.grad = None
                entry.cleared = True

    # ---- what the program may do --------------------------------------------------------------

    def check_may_read(self, fresh: bool) -> None:
        """See `SumUse`."""
        raise InvalidUsage(
            "with sharded=True a rank has the sums of its shards only, so gradients cannot be read "
            "or changed element by element between backward() and step(), nor later. "
            "clip_grad_norm_, clip_grad_value_, norms of order 2 and infinity, get_total_norm and "
            "GradScaler work. To read gradients, leave sharded out"
        )

    def check_may_keep(self, name: str) -> None:
        """See `SumUse`."""
        raise InvalidUsage(
            f"the program keeps the gradient of '{name}', or a tensor or array of the same memory "
            "(flat gradients), but with sharded=True a rank has the sums of its shards only. Set "
            ".grad to None before backward(), or leave sharded out"
        )

    def check_may_be_sparse(self, name: str) -> None:
        """See `SumUse`."""
        raise InvalidUsage(
            f"the gradient of '{name}' is sparse, which sharded=True cannot divide; pass "
            "sparse_as_dense=True to DistributedOptimizer as well"
        )

    def check_may_lack_maxima(self, why: str) -> None:
        """See `SumUse`."""
        raise InvalidUsage(
            f"with sharded=True the infinity norm of gradients is not known here: {why}. Read one "
            "on every rank in the first two steps as well, clip by the norm of order 2, or leave "
            "sharded out"
        )

    def check_may_join(self) -> None:
        """See `SumUse`."""
        raise InvalidUsage(
            "join() cannot be used with sharded=True: the other ranks need this rank's shards"
        )

    def _refuse_clipped_without(self, name: str) -> None:
        """Refuses norms or changes that left out a gradient which only other ranks have."""
        raise InvalidUsage(
            f"parameter '{name}' has no gradient on rank {self._rank}, but on other ranks, so "
            "gradients were clipped or unscaled without it here: with sharded=True call "
            "optimizer.synchronize() after backward(), which gives it one"
        )
