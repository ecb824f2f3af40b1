"""Passes collectives that operators of graphs request to the backend.

An operator holds a number that stands for a `Collective`. When TensorFlow executes it, the library
of operators queues the call; a thread fetches it here and starts it with the backend, in the order
of execution, and another waits for its end. No thread of TensorFlow is ever blocked, so collectives
that wait for each other cannot use all of them up.
"""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
from collections.abc import Callable

import tensorflow as tf

from hvd_order.tensorflow.backend.failures import code_of
from hvd_order.tensorflow.backend.interface import Backend, Collective, HostTensor
from hvd_order.tensorflow.backend.op_library import NativeTensor, OpLibrary

__all__ = [
    "RequestServer",
    "collective_of",
    "number_of_collective",
    "reductions_started",
]


class _Collectives:
    """The collectives that graphs hold by number.

    They belong to the process and not to a job: a graph may live as long as the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._numbers: dict[Collective, int] = {}
        self._by_number: list[Collective] = []
        self._reductions = 0

    def number_of(self, collective: Collective) -> int:
        with self._lock:
            if collective not in self._numbers:
                self._numbers[collective] = len(self._by_number)
                self._by_number.append(collective)
            return self._numbers[collective]

    def with_number(self, number: int) -> Collective:
        with self._lock:
            return self._by_number[number]

    def count(self, collective: Collective) -> None:
        with self._lock:
            self._reductions += collective.kind != "broadcast"

    @property
    def reductions(self) -> int:
        with self._lock:
            return self._reductions


_collectives = _Collectives()


def number_of_collective(collective: Collective) -> int:
    """Number that an operator holds for `collective`; equal collectives share a number."""
    return _collectives.number_of(collective)


def collective_of(number: int) -> Collective:
    """Returns the collective with this number."""
    return _collectives.with_number(number)


def reductions_started() -> int:
    """Number of collectives other than broadcasts that this process has begun."""
    return _collectives.reductions


class _Waiters:
    """Threads that wait for collectives, one for each in flight; they are reused.

    They are daemons: a thread that waits for a missing rank must not delay the exit.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._idle = 0  # threads that wait for work that is not meant for another
        self._stopped = False

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work` on a thread that has nothing else to do."""
        with self._lock:
            found = self._idle > 0
            if found:
                self._idle -= 1
        self._work.put(work)
        if not found:
            threading.Thread(target=self._serve, name="hvd_order collective", daemon=True).start()

    def stop(self) -> None:
        """Ends the threads, each when it has nothing to do."""
        with self._lock:
            self._stopped = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                if self._stopped:
                    return
                self._idle += 1


class RequestServer:
    """The thread that serves the operators from ``init()`` to ``shutdown()``."""

    def __init__(self, library: OpLibrary, backend: Backend) -> None:
        """Starts to run collectives of operators."""
        self._native = library.native
        self._backend = backend
        self._waiters = _Waiters()
        self._native.hvdo_open_collectives()
        self._thread = threading.Thread(
            target=self._serve, name="hvd_order tensorflow", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends collectives that have not started, and all later ones, with an error.

        The rest end with the backend.
        """
        self._native.hvdo_close_collectives()
        self._thread.join()
        self._waiters.stop()

    def _serve(self) -> None:
        while (call := self._native.hvdo_next_call()) is not None:
            try:
                tensors = self._inputs(call)
                collective = collective_of(self._native.hvdo_call_description(call))
                finish = self._backend.start(collective, tensors)
                _collectives.count(collective)
            except Exception as error:
                self._fail(call, error)
                continue
            self._waiters.run(functools.partial(self._finish, call, finish))

    def _inputs(self, call: int) -> list[HostTensor]:
        tensors = []
        for i in range(self._native.hvdo_call_inputs(call)):
            tensor = NativeTensor()
            self._native.hvdo_call_input(call, i, ctypes.byref(tensor))
            tensors.append(
                HostTensor(
                    _dtype_name(tensor.dtype), tuple(tensor.shape[: tensor.rank]), tensor.data or 0
                )
            )
        return tensors

    def _finish(self, call: int, finish: Callable[[], list[HostTensor]]) -> None:
        try:
            results = finish()
            count = len(results)
            packed = (NativeTensor * count)(*[_packed(result) for result in results])
        except Exception as error:
            self._fail(call, error)
        else:
            self._native.hvdo_end_call(call, count, packed)

    def _fail(self, call: int, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        self._native.hvdo_fail_call(call, code_of(type(error)), text.encode())


@functools.cache
def _dtype_name(number: int) -> str:
    name: str = tf.dtypes.as_dtype(number).name
    return name


def _packed(tensor: HostTensor) -> NativeTensor:
    dtype = tf.dtypes.as_dtype(tensor.dtype)
    count = 1
    for length in tensor.shape:
        count *= length
    return NativeTensor(
        dtype.as_datatype_enum,
        len(tensor.shape),
        (ctypes.c_int64 * len(tensor.shape))(*tensor.shape),
        tensor.address,
        count * dtype.size,
    )
