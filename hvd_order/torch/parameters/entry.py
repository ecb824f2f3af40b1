"""State that hvd_order stores about one parameter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_order._native import _torch as native
from hvd_order.torch.parameters.in_flight import Change
from hvd_order.torch.parameters.kept_state import KeptState

__all__: list[str] = []

# Without the exception's type: torch makes this a RuntimeError.
_LOCKED = (
    "StaleRead: parameter '{name}' was read before the update of the last step had been applied, "
    "by code that hvd_order cannot see (C++, a reader that avoids __torch_function__, or an "
    "operator that ran on another thread during step()). Call optimizer.flush() before that read, "
    "or set HVD_ORDER_CROSS_ITERATION=0."
)


# Also what a second backward pass meets, which would add to the gradient before any hook runs.
_REFUSED = (
    "the gradient of '{name}' is being summed over the ranks, and code that hvd_order cannot see "
    "has used it. A second backward pass: Gradients were computed more than "
    "backward_passes_per_step times before call to step() (parameter '{name}'). Increase "
    "backward_passes_per_step to accumulate gradients locally, and clip after the last of these "
    "passes; or call optimizer.step() or optimizer.zero_grad() before the next backward(). C++ "
    "code: call optimizer.synchronize() before it reads gradients, and optimizer.flush() if it "
    "does so after step()."
)


@dataclass(eq=False)
class ParameterEntry(native.GradientEntry):
    """One parameter, its gradient's place in the buffers, and the state of both in the step.

    Attributes:
        wire: the gradient's place in its buffer, as it is sent (compressed or not).
        gradient: the tensor that becomes ``parameter.grad``, unless that is `own`.
        on_wire: ``gradient`` lies in the memory of ``wire``: it is not compressed.
        own: the program's tensor that stays ``parameter.grad``, since the program reaches it or its
            memory without ``parameter``; the sum is copied into it.
        casts: ``wire`` is a cast of ``gradient`` to 16 bits, which native code makes in one pass.
        residual: what this rank owes to the sum, where sums are encoded; else None.
        tensor: TensorId, the place in consumption order.
        passes_to_go: backward passes until the gradient is sent.
        late: the update of the last step was still deferred when this step's gradients came.
        fresh: ``parameter.grad`` was None when this backward pass produced its first gradient.
        ready_s: when the gradient was in its buffer, time.monotonic(); set when the model's
            registration ends (registered_model.py).
        use_flag: see gradient_buffers.py; 1 element.
        sent, summed, update_pending: the phase of the gradient and its update, which `advance`
            alone changes (csrc/torch/gradients/gradient_phase.h). What follows says more of a
            gradient in its phase.
        changes: known changes of the gradient in this step; they are made once it is complete.
        kept: plain tensors of the program that have the parameter's memory and are pending with it.
        kept_state: the parameter's state in the optimizer, if the program can read it, too.
    """

    parameter: torch.nn.Parameter
    name: str
    size_bytes: int = field(init=False)  # of the parameter
    on_device: bool = field(init=False)  # not in the memory of the CPU

    compression_context: Any = None
    residual: torch.Tensor | None = None
    changes: list[Change] = field(default_factory=list)
    kept: Sequence[torch.Tensor] = ()
    kept_state: KeptState | None = None
    _changes_made: int = 0
    squares: torch.Tensor | None = None  # their sum is the sum of squares of `gradient`
    own: torch.Tensor | None = None
    last_own: weakref.ref[torch.Tensor] | None = None  # `own` of the last step
    absent: bool = False  # this rank had no gradient to contribute
    cleared: bool = False  # absent, and its owner has called zero_grad since
    used: bool = True  # some rank had a gradient; set when summed
    sparse: bool = False  # exchanged by sparse.py instead of the buffers
    placed: bool = False  # has a place in the buffers, required until the ranks find it sparse
    deferrable: bool = False  # the first reader of the parameter in a step is known
    ready_s: float = 0.0
    updated: Any = None  # on a device: the guard that waits for the parameter's last update

    def __post_init__(self) -> None:
        """Creates the native part."""
        super().__init__()
        self.name_locks(_REFUSED.format(name=self.name), _LOCKED.format(name=self.name))
        self.size_bytes = self.parameter.nbytes
        self.on_device = self.parameter.device.type != "cpu"

    @property
    def shown(self) -> torch.Tensor:
        """The tensor in which the program finds the gradient."""
        return self.gradient if self.own is None else self.own

    @property
    def is_set_by_hand(self) -> bool:
        """Whether the program has set a gradient since the last step: not that step's, kept."""
        gradient = self.parameter.grad
        if gradient is None or gradient is self.gradient:
            return False
        return self.last_own is None or gradient is not self.last_own()

    def make_changes(self) -> None:
        """Makes the changes that are still to be made to the gradient, which is complete."""
        for change in self.changes[self._changes_made :]:
            change.apply(self.gradient)
            self.squares = None
        self._changes_made = len(self.changes)

    def begin_step(self, passes: int) -> None:
        """Prepares the entry for the gradients of the next step."""
        super().begin_step(passes)
        self.squares = None
        self.changes.clear()
        self._changes_made = 0
        self.last_own = None if self.own is None else weakref.ref(self.own)
        self.own = None
        self.absent = False
        self.cleared = False
        self.used = True
