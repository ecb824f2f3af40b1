"""The parameters of one optimizer: with hooks, registered, and averaged by nobody else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hvd_order.engine.job import activity
from hvd_order.engine.requests.step_log import StepLogs
from hvd_order.torch.gradients import conflicts
from hvd_order.torch.gradients.parts import ExchangeParts
from hvd_order.torch.parameters import graph_capture
from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []


class HookedExchange(conflicts.Exchange, Protocol):
    """The part of `GradientExchange` that hooks need."""

    def on_gradient(self, entry: ParameterEntry) -> None:
        """Handles a backward pass's first gradient, or one that the sender does not handle."""


class TrainedParameters:
    """Adds parameters to an exchange. Its lock is held in all methods.

    Attributes:
        device_types: of all parameters.
    """

    def __init__(
        self,
        exchange: HookedExchange,
        parts: ExchangeParts,
        steps: StepLogs,
        rank: int,
    ) -> None:
        """Starts without parameters.

        Args:
            exchange: to which gradients go.
            steps: logs of all exchanges.
            rank: in the job.
        """
        self.device_types: set[str] = set()
        self._exchange = weakref.ref(exchange)
        self._parts = parts
        self._steps = steps
        self._rank = rank
        self._hooks: list[Any] = []
        self._no_conflict = False  # no other object averages gradients of these parameters
        weakref.finalize(exchange, _remove, self._hooks).atexit = False

    def add(self, entries: Sequence[ParameterEntry]) -> None:
        """Adds parameters, and registers all. Collective."""
        exchange = self._exchange()
        assert exchange is not None
        self._no_conflict = False
        conflicts.refuse_sharded(entries, self._rank)
        table = self._parts.table
        table.add(entries)
        conflicts.register(exchange, entries)
        for entry in entries:
            hook = self._parts.model.sender.hook(
                entry,
                guard=weakref.ref(self._parts.guard),
                otherwise=_hook(self._exchange, weakref.ref(entry)),
            )
            self._hooks.append(entry.parameter.register_post_accumulate_grad_hook(hook))
        devices = {entry.parameter.device for entry in table.entries}
        self.device_types = {device.type for device in devices}
        self._parts.transfer.use_devices(devices)
        self._parts.warm_up.start(table.entries)

    def add_later(self, entries: Sequence[ParameterEntry]) -> None:
        """Adds parameters of an optimizer that has trained; or none, where some have changed."""
        self._steps.check_nobody_joined("parameters are added, unfrozen or converted")
        what = f"('{entries[0].name}', ...)" if entries else "of another dtype, shape or device"
        with activity.waiting(
            f"registers parameters {what}: add_param_group(), requires_grad_() and conversions are "
            "for all ranks, after the same step"
        ):
            self.add(entries)

    def check_no_conflict(self) -> None:
        """Raises InvalidUsage if another object averages gradients of these parameters."""
        exchange = self._exchange()
        assert exchange is not None
        if not self._no_conflict or conflicts.in_doubt(exchange):
            conflicts.refuse(exchange, self._parts.table.entries, self._rank)
            self._no_conflict = True

    def remove_hooks(self) -> None:
        """Leaves gradients to the program."""
        _remove(self._hooks)


def _hook(
    exchange: weakref.ref[HookedExchange], entry: weakref.ref[ParameterEntry]
) -> Callable[[torch.Tensor], None]:
    @graph_capture.outside
    def on_gradient(_: torch.Tensor) -> None:
        conflicts.collect_garbage()
        alive, mine = exchange(), entry()
        if alive is not None and mine is not None:
            graph_capture.refuse_compiled_backward(mine.name)
            alive.on_gradient(mine)

    return on_gradient


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
