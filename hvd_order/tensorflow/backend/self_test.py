"""Tests a build of the operators: ``python -m hvd_order.tensorflow.backend.self_test LIBRARY``.

Runs in a separate process, since an incompatible build may crash. Every operator runs in a traced
function and is completed late, by a thread that TensorFlow does not manage.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_order.tensorflow.backend import op_library

__all__: list[str] = []

_LATE_S = 0.05  # long after the compute function has returned

_FAILED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)


class _QueuePosition(ctypes.Structure):
    _fields_ = (("exchange", ctypes.c_uint32), ("index", ctypes.c_uint32))


class _SumTaker(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("receive", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)),
        ("done", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("failed", _FAILED),
    )


_POST = ctypes.CFUNCTYPE(
    ctypes.c_int, _QueuePosition, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, _FAILED
)
_TAKE = ctypes.CFUNCTYPE(None, _QueuePosition, ctypes.POINTER(_SumTaker))


class _Api(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32),
        ("size_bytes", ctypes.c_uint32),
        ("post", _POST),
        ("take", _TAKE),
    )


class _LateEngine:
    """An engine of one rank without transport: returns posted gradients late.

    Attributes:
        api: the function table (csrc/tensorflow/engine_api.h).
    """

    REFUSED = 7  # the position whose gradient never gets a sum

    def __init__(self) -> None:
        self._posted: dict[tuple[int, int], bytes] = {}
        self.api = _Api(1, ctypes.sizeof(_Api), _POST(self._post), _TAKE(self._take))

    def _post(
        self, position: _QueuePosition, data: int, size: int, _context: int, _failed: object
    ) -> int:
        self._posted[position.exchange, position.index] = ctypes.string_at(data, size)
        return 1

    def _take(self, position: _QueuePosition, pointer: Any) -> None:
        taker = _SumTaker.from_buffer_copy(pointer.contents)
        data = self._posted.pop((position.exchange, position.index))

        def end() -> None:
            if position.index == self.REFUSED:
                taker.failed(taker.context, 2, b"PeerLost: as it should")
            else:
                taker.receive(taker.context, data, len(data))
                taker.done(taker.context)

        threading.Timer(_LATE_S, end).start()


def _gradients(ops: Any) -> None:
    """Reduce, and post with take, several at a time."""
    variables = [tf.Variable(tf.zeros([3, 2])) for _ in range(4)]

    @tf.function
    def reduce(x: tf.Tensor) -> list[tf.Tensor]:
        return [
            ops.hvd_order_reduce(v.handle, x + float(i), exchange=1, position=i)
            for i, v in enumerate(variables)
        ]

    @tf.function
    def post_and_take(x: tf.Tensor) -> list[tf.Tensor]:
        for i, v in enumerate(variables):
            ops.hvd_order_post(v.handle, x + float(i), exchange=2, position=i)
        return [
            ops.hvd_order_take(v.handle, T=tf.float32, shape=[3, 2], exchange=2, position=i)
            for i, v in enumerate(variables)
        ]

    x = tf.reshape(tf.range(6.0), [3, 2])
    for function in (reduce, post_and_take):
        for _ in range(2):
            for i, y in enumerate(function(x)):
                np.testing.assert_array_equal(y, x + float(i))
    try:
        ops.hvd_order_reduce(variables[0].handle, x, exchange=1, position=_LateEngine.REFUSED)
        message = "nothing was raised"
    except tf.errors.AbortedError as error:
        message = str(error)
    assert "PeerLost: as it should" in message, message


def _collectives(library: op_library.OpLibrary) -> None:
    """A collective with two inputs of different types and shapes, and a handle beside them."""
    native = library.native

    def end(call: int) -> None:
        count = native.hvdo_call_inputs(call)
        tensors = (op_library.NativeTensor * count)()
        for i in range(count):
            native.hvdo_call_input(call, i, ctypes.byref(tensors[i]))
        native.hvdo_end_call(call, count, tensors)

    def serve(then: Callable[[int], None]) -> None:
        while (call := native.hvdo_next_call()) is not None:
            assert native.hvdo_call_description(call) == 5
            threading.Timer(_LATE_S, then, [call]).start()

    order = tf.Variable(0.0).handle

    @tf.function
    def echo(x: tf.Tensor, y: tf.Tensor) -> Any:
        return library.ops.hvd_order_collective(
            [x, y], [order], Tout=[tf.float32, tf.int64], description=5
        )

    native.hvdo_open_collectives()
    thread = threading.Thread(target=serve, args=[end])
    thread.start()
    for _ in range(2):
        x, y = echo(tf.range(5.0), tf.constant(3, tf.int64))
        np.testing.assert_array_equal(x, np.arange(5.0))
        assert int(y) == 3
    native.hvdo_close_collectives()
    thread.join()


def main() -> None:
    """Runs the test; raises or crashes if the build does not work."""
    library = op_library.open_library(Path(sys.argv[1]))
    engine = _LateEngine()
    library.set_engine_api(ctypes.addressof(engine.api))
    _gradients(library.ops)
    _collectives(library)


if __name__ == "__main__":
    main()
