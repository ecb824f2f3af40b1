"""What the sums of one optimizer's gradients are used for.

A sum ends in one of three ways:

* this rank's optimizer takes it whole: `SumUse`;
* this rank updates its shards of the parameters with it, and the parameters follow: shard_sums.py;
* a parameter server takes it and answers with the parameter: servers/worker/server_update.py, which
  registers itself in `USES`.

The road of a gradient is one for all three, and asks the use where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim import Optimizer

from hvd_order._native import _torch as native
from hvd_order.base.errors import InvalidUsage
from hvd_order.base.wings import Registry
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.read_guard import Guard
from hvd_order.torch.sums.arrivals import Arrivals
from hvd_order.torch.updates.partial_step import InnerStep

if TYPE_CHECKING:
    from hvd_order.torch.shards.model_shards import ModelShards

__all__: list[str] = []


class Model(Protocol):
    """The part of `RegisteredModel` that a use works with.

    Attributes:
        entries: by TensorId.
        gradients: the sums.
        parameters: what follows them where sums travel in halves.
        arriving: what the update takes: the one or the other.
    """

    entries: Sequence[ParameterEntry]
    gradients: Arrivals
    parameters: Arrivals
    arriving: Arrivals

    def find_used(self) -> Sequence[ParameterEntry]:
        """The parameters that only other ranks have used; all gradients have been sent."""


class Step(Protocol):
    """The part of `StepGradients` that a use works with."""

    used_in_flight: bool

    def replaced(self) -> bool: ...
    def finish(self, guard: Guard) -> None: ...
    def show_all(self, guard: Guard) -> None: ...
    def check_not_given_up(self, entries: Sequence[ParameterEntry]) -> None: ...


class SumUse:
    """Whole gradients for the optimizer of this rank. The other uses say what they do otherwise.

    Attributes:
        in_halves: sums travel in halves. This rank has its part of each after the first one, and
            parameters travel in the second; so places and slices stay as they are.
        shards: the optimizer's state, if each rank has its shards of it.
    """

    in_halves = False
    shards: ModelShards | None = None

    def __init__(self, step: InnerStep) -> None:
        """Takes the ``step`` of the user's class."""
        self._step = step

    @property
    def returns_sums(self) -> bool:
        """Whether sums and use flags arrive, and not what somebody else has made of them."""
        return True

    @property
    def is_readable(self) -> bool:
        """Whether the elements of gradients are there for the program once sums have arrived."""
        return True

    @property
    def state_owner(self) -> str | None:
        """Who keeps the state in place of the ranks; None: nobody."""
        return None

    # ---- registration: collective -------------------------------------------------------------

    def check_entries(
        self, entries: Sequence[ParameterEntry], before: Sequence[ParameterEntry]
    ) -> None:
        """Raises InvalidUsage if parameters cannot be registered.

        Args:
            before: those that are registered.
        """

    def lay_out(
        self,
        entries: Sequence[ParameterEntry],
        buffers: Sequence[torch.Tensor],
        layout: native.SliceLayout,
        observed: bool,
    ) -> None:
        """Takes the places of gradients, which are about to be registered.

        Args:
            entries: by TensorId.
            observed: readers were observed, so these places are those of the training.
        """

    def update_groups(self, entries: Sequence[ParameterEntry]) -> list[tuple[int, int]]:
        """Elements and parameter group of each entry, for a transport that updates; else empty."""
        del entries
        return []

    def registered(self, model: int, entries: Sequence[ParameterEntry]) -> None:
        """Handles a new registration under an id of the engine."""

    def before_end(self) -> None:
        """Handles the end of the registration that is to come; nothing is in flight."""

    # ---- a step -------------------------------------------------------------------------------

    def begin_step(self, entries: Sequence[ParameterEntry]) -> None:
        """Handles the first gradient of a step."""

    def synchronize(self, step: Step, guard: Guard) -> None:
        """Makes the gradients of a step what the program may use before ``step()``."""
        step.finish(guard)

    def check_step(self) -> None:
        """Raises InvalidUsage if this ``step()`` has other settings than its gradients had."""

    def update(
        self, optimizer: Optimizer, model: Model, step: Step, streams: native.HomeStreams
    ) -> bool:
        """Makes, in ``step()``, the updates that `step` does not make; all gradients have been
        sent.

        Args:
            streams: on which updates are made.

        Returns:
            Whether the optimizer has run.
        """
        del optimizer, model, step, streams
        return False

    def step(self, optimizer: Optimizer, *closure: Any) -> Any:
        """The inner step: updates parameters by what is in their gradients."""
        return self._step(optimizer, *closure)

    def are_gradients(self, arrived: Sequence[ParameterEntry]) -> bool:
        """Whether what has arrived is to be made gradients; if not, it has been dealt with."""
        del arrived
        return True

    def end_step(self, entries: Sequence[ParameterEntry]) -> None:
        """Handles the end of a step's gradients, with an update or without."""

    # ---- state --------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Fetches parameters and state from whoever keeps them; nothing may be in flight."""

    def check_may_load(self) -> None:
        """Raises InvalidUsage if no state can be loaded now."""

    # ---- what the program may do --------------------------------------------------------------

    def check_may_read(self, fresh: bool) -> None:
        """Raises InvalidUsage if the program may not read the elements of gradients.

        Args:
            fresh: between ``step()`` and the next gradient.
        """

    def check_may_keep(self, name: str) -> None:
        """Raises InvalidUsage if the program keeps a gradient, and none will come in its place."""

    def check_may_be_sparse(self, name: str) -> None:
        """Raises InvalidUsage if gradients have to be dense."""

    def check_may_lack_maxima(self, why: str) -> None:
        """Raises InvalidUsage if infinity norms have to be known early, and are not."""

    def check_may_join(self) -> None:
        """Raises InvalidUsage if the other ranks cannot go on without this one."""


def refuse_resized(entries: Sequence[ParameterEntry], what: str) -> None:
    """Refuses parameters of another shape where others keep state of the old one."""
    for entry in entries:
        if entry.gradient.shape != entry.parameter.shape:
            raise InvalidUsage(
                f"parameter '{entry.name}' had the shape {tuple(entry.gradient.shape)} and has "
                f"{tuple(entry.parameter.shape)} now: with {what} the optimizer's state of a "
                "parameter is not on this rank alone, and keeps its shape. Make a new optimizer"
            )


# Optimizer, the step of its class, the channel of the model, whether gradients are compressed, and
# the factor of sums.
MakeUse = Callable[[Optimizer, InnerStep, ModelChannel, bool, float], SumUse]
USES: Registry[MakeUse] = Registry("use of sums")
