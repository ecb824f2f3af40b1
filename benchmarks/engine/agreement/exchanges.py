"""The rivals: the engine with each agreement, and what DDP does, behind one interface."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hvd_order._native import _torch as native
from hvd_order.engine.engine_host import EngineHost

_MODEL = 0


class Exchange(Protocol):
    """Sums the gradients of a synthetic step."""

    def ready(self, tensor: int) -> None:
        """This rank has the gradient. Any thread."""

    def end_of_backward(self) -> None:
        """Called before the next forward; may block."""

    def wait(self, tensor: int) -> None:
        """Returns when the tensor is summed."""


class Ordered:
    """The engine: next forward waits for what it reads, and no more."""

    def __init__(
        self, host: EngineHost, layout: native.SliceLayout, flat: list[torch.Tensor], planned: bool
    ) -> None:
        # The same plan as the optimizers': gradients come in the reverse of consumption order.
        plan = list(range(len(layout.slices)))[::-1] if planned else []
        host.add_model(_MODEL, layout, flat, plan)
        self._host = host
        self._gradients = _places(layout, flat)

    def ready(self, tensor: int) -> None:
        host = self._host
        native.mark_ready_when_computed(
            host.engine, host.transport, _MODEL, tensor, self._gradients[tensor]
        )

    def end_of_backward(self) -> None:
        """Nothing: that is the point."""

    def wait(self, tensor: int) -> None:
        self._host.engine.wait(_MODEL, tensor)


class LikeDdp:
    """c10d alone: the same slices last to first, all of them awaited before the next forward."""

    def __init__(
        self, group: dist.ProcessGroup, layout: native.SliceLayout, flat: list[torch.Tensor]
    ) -> None:
        self._group = group
        self._slices = [
            flat[s.buffer][s.offset_bytes // 4 : (s.offset_bytes + s.size_bytes) // 4]
            for s in layout.slices
        ]
        self._tensors_of = [len(layout.tensors_of(s)) for s in range(len(self._slices))]
        self._slices_of = [
            layout.slices_of(t) for t in range(1 + max(s.last_tensor for s in layout.slices))
        ]
        self._changed = threading.Condition()
        self._begin_step()

    def ready(self, tensor: int) -> None:
        with self._changed:
            for number in self._slices_of[tensor]:
                self._missing[number] -= 1
            # Every rank issues in the same fixed order, as DDP does with its buckets.
            while self._next >= 0 and self._missing[self._next] == 0:
                view = self._slices[self._next]
                self._works.append(dist.all_reduce(view, group=self._group, async_op=True))
                self._next -= 1
            self._changed.notify()

    def end_of_backward(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._next < 0)
        for work in self._works:
            work.wait()
        self._begin_step()

    def wait(self, tensor: int) -> None:
        """Nothing is outstanding any more."""

    def _begin_step(self) -> None:
        self._missing = list(self._tensors_of)
        self._next = len(self._slices) - 1
        self._works: list[Any] = []


def _places(layout: native.SliceLayout, flat: list[torch.Tensor]) -> list[torch.Tensor]:
    """One element of each tensor's place: the engine only asks on which device it is."""
    count = 1 + max(s.last_tensor for s in layout.slices)
    buffers = [layout.slices[layout.slices_of(t)[0]].buffer for t in range(count)]
    return [flat[buffers[t]].narrow(0, layout.tensor_offset(t) // 4, 1) for t in range(count)]
