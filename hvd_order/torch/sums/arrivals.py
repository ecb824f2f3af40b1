"""How far the tensors of a registered model have come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hvd_order._native import _torch as native
from hvd_order.engine.engine_host import EngineHost
from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []

ENDED, UNDER_WAY = int(native.Stage.ENDED), int(native.Stage.UNDER_WAY)
_ENQUEUED = native.Stage.ENQUEUED


_LEAST_NS = 20_000  # shorter waits belong to what surrounds them


class Waits:
    """The waits of the present step, for its account.

    Attributes:
        spans: begin and end, ns of time.monotonic_ns(), and the TensorId that was waited for.
    """

    def __init__(self) -> None:
        """Starts without waits."""
        self.spans: list[tuple[int, int, int]] = []

    def ended(self, begin_ns: int, tensor: int) -> None:
        """Notes that a wait for a tensor has ended."""
        now = time.monotonic_ns()
        if now - begin_ns >= _LEAST_NS:
            self.spans.append((begin_ns, now, tensor))


class Arrivals:
    """One tensor of each entry: the sum of its gradient; or, where sums travel in halves, the
    parameter that follows.
    """

    def __init__(self, host: EngineHost, model: int, first: int, waits: Waits) -> None:
        """Takes the TensorId of the first entry's tensor in the layout of the model."""
        self._waits = waits
        self._host = host
        self._model = model
        self._first = first
        self._waits_on_device = "host_waits" not in host.job.config.debug

    def place_of(self, entry: ParameterEntry) -> dict[str, Any]:
        """Where the entry's tensor is: its model and its number there, for the timeline."""
        return {"model": self._model, "tensor": self._first + entry.tensor}

    def mark_ready(self, entry: ParameterEntry) -> None:
        """Marks the tensor in ``entry.wire`` ready, once its device has computed it."""
        native.mark_ready_when_computed(
            self._host.engine, self._host.transport, self._model, self._first + entry.tensor,
            entry.wire,
        )  # fmt: skip

    def stages(self) -> bytes:
        """The stage of each tensor at this moment, by place of its entry: values of
        `native.Stage`.
        """
        self._host.copier.release()
        return self._host.engine.stages(self._model)[self._first :]

    def can_be_taken(self) -> Callable[[ParameterEntry], bool]:
        """A test whether `wait` for an entry would block the host."""
        stages = self.stages()
        if self._waits_on_device:
            return lambda entry: stages[entry.tensor] != UNDER_WAY
        return lambda entry: stages[entry.tensor] == ENDED

    def wait(self, entry: ParameterEntry) -> None:
        """Waits for the entry's tensor. Raises the engine's failure.

        On a device only the current stream waits; the host waits until the sum is enqueued.
        """
        if not (entry.on_device and self._waits_on_device):
            self.wait_on_host(entry)
        else:
            tensor = self._first + entry.tensor
            begin = time.monotonic_ns()
            self._host.engine.wait(self._model, tensor, _ENQUEUED)
            self._waits.ended(begin, tensor)
            self._host.transport.order_behind_sums(self._model, tensor, entry.wire.device)

    def wait_on_host(self, entry: ParameterEntry) -> None:
        """Waits until the entry's tensor has arrived, on devices too."""
        begin = time.monotonic_ns()
        self._host.engine.wait(self._model, self._first + entry.tensor)
        self._waits.ended(begin, self._first + entry.tensor)
