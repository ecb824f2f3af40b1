"""The engine of a process set, and the gradients that are registered with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_order._native import _core as native
from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import PROBE_BYTES, measured_link
from hvd_order.base.link.slice_settings import SliceSettings, best_settings, reservation_lead_s
from hvd_order.base.same_model import check_same
from hvd_order.tensorflow.backend.interface import Gradient
from hvd_order.tensorflow.backend.layout import Arrangement
from hvd_order.tensorflow.backend.mpi.arrays import dtype_of
from hvd_order.tensorflow.backend.mpi.members import Members
from hvd_order.tensorflow.backend.mpi.mover import BUSY_S, Mover, Served

__all__ = ["SetEngine"]

_FIRST = SliceSettings(2 * 2**20, 8 * 2**20)  # used until the transport has been measured
_IN_FLIGHT = 2
_FIRST_STEP = "first step of training"


class SetEngine:
    """Owns an engine and its connections."""

    def __init__(self, objects: Members, mover: Mover, config: Config) -> None:
        """Collective among the members.

        Args:
            objects: communicator of the registration of gradients.
        """
        self._objects = objects
        self._mover = mover
        self._config = config
        self._served = Served(
            native.PolledPort(), objects.another(_FIRST_STEP), objects.another(_FIRST_STEP)
        )
        self._settings = _FIRST.with_settings(
            config.slice_bytes, config.credit_bytes, config.policy
        )
        self._measured = False
        self._models: set[int] = set()
        if config.agreement == "planned":
            raise InvalidUsage("HVD_ORDER_AGREEMENT=planned is not there over MPI; leave it out")
        self._agreement = getattr(native.AgreementKind, (config.agreement or "leader").upper())
        port = self._served.port
        mover.serve(self._served)
        self.engine = native.Engine(
            rank=objects.rank,
            size=objects.size,
            agreement=self._agreement,
            policy=self._policy,
            credit_bytes=self._settings.credit_bytes,
            timeout_s=config.timeout.total_seconds(),
            stall_warning_s=config.stall_warning.total_seconds(),
            transport=port.transport(),
            control=port.control(),
        )

    @property
    def _policy(self) -> native.Policy:
        return (
            native.Policy.ARRIVAL if self._settings.policy == "arrival" else native.Policy.PRIORITY
        )

    def close(self) -> None:
        """Notifies the other ranks and stops the engine."""
        self.engine.shutdown()
        self._mover.leave(self._served)

    def register(self, gradients: Sequence[Gradient], order: Sequence[int]) -> MpiGradients:
        """Lays gradients out in rank 0's order. Collective.

        Raises:
            ModelMismatch: the ranks have different gradients.
        """
        mine = [(str(i), gradients[i].shape, gradients[i].dtype) for i in order]
        everyone = self._objects.gather((mine, self._models), _FIRST_STEP)
        check_same([each[0] for each in everyone], self._objects.ranks)
        taken = set().union(*(models for _, models in everyone))
        number = next(i for i in range(256) if i not in taken)
        laid_out = Arrangement.of(
            gradients, [int(place) for place, _, _ in everyone[0][0]],
            lambda name: dtype_of(name).itemsize,
        )  # fmt: skip
        if not taken and not self._measured:
            self._measure(laid_out.size_bytes)
        layout = native.SliceLayout(laid_out.tensors, self._settings.slice_bytes)
        dtypes = [dtype_of(name) for name in laid_out.dtypes]
        flat = [_aligned(size_bytes) for size_bytes in layout.buffer_bytes]
        addresses = [int(buffer.ctypes.data) for buffer in flat]
        self._served.dtypes[number] = dtypes
        self._served.memory[number] = flat
        self._served.port.set_buffers(number, addresses)
        self.engine.add_model(number, layout, [])
        self._models.add(number)
        places = laid_out.places(lambda i: addresses[i], layout.tensor_offset)
        return MpiGradients(self, number, places)

    def forget(self, model: int) -> None:
        """Forgets gradients of which none is in flight."""
        self.engine.remove_model(model)  # raises if slices are in flight: their memory stays
        self._served.port.remove_buffers(model)
        self._served.memory.pop(model)
        self._models.discard(model)

    def _measure(self, size_bytes: int) -> None:
        """Measures the network and chooses slice settings for `size_bytes`. Collective."""
        self._measured = True
        buffer = np.zeros(PROBE_BYTES // 4, np.float32)
        data = self._served.data

        def time_stream(sizes: list[int]) -> float:
            begin = time.monotonic()
            under_way: list[MPI.Request] = []
            for size in sizes:
                if len(under_way) == _IN_FLIGHT:
                    data.finish(under_way.pop(0), _FIRST_STEP, BUSY_S)
                part = buffer[: size // 4] if not under_way else buffer[-(size // 4) :]
                under_way.append(data.comm.Iallreduce(MPI.IN_PLACE, part, MPI.SUM))
            for request in under_way:
                data.finish(request, _FIRST_STEP, BUSY_S)
            return time.monotonic() - begin

        link = measured_link(time_stream)
        settings = best_settings(link, size_bytes).with_settings(
            self._config.slice_bytes, self._config.credit_bytes, self._config.policy
        )
        self._settings, link = self._objects.gather((settings, link), _FIRST_STEP)[0]
        self.engine.retune(
            self._agreement,
            self._policy,
            self._settings.credit_bytes,
            reservation_lead_s(link, self._settings),
        )


class MpiGradients:
    """Gradients in buffers of the engine, for operators to post and take.

    The creator also closes it, when no gradient is in flight.
    """

    def __init__(
        self,
        engine: SetEngine,
        model: int,
        places: list[tuple[str, int, int, int]],
    ) -> None:
        self._engine: SetEngine | None = engine
        self._model = model
        self._queue = native.OpGradientQueue(engine.engine, model, places)

    @property
    def number(self) -> int:
        """Number that identifies the gradients to operators."""
        return self._queue.number

    @property
    def posts(self) -> int:
        """Number of gradients that this process has posted."""
        return self._queue.posts

    def close(self) -> None:
        """Ends everything in flight with an error; a second call does nothing."""
        self._queue.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.forget(self._model)


def _aligned(size_bytes: int) -> Any:
    """Memory that begins at a cache line."""
    whole = np.zeros(size_bytes + 64, np.uint8)
    begin = -whole.ctypes.data % 64
    return whole[begin : begin + size_bytes]
