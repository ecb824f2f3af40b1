"""Gradients of a list of variables, summed over the ranks by the engine.

The ranks agree on the exchange at the first gradients of these variables; for a traced function
this is during tracing. Afterwards only operators run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_order.base.errors import HvdOrderError, ModelMismatch
from hvd_order.tensorflow.backend import op_library
from hvd_order.tensorflow.backend.failures import as_both, translated
from hvd_order.tensorflow.backend.interface import Gradient, GradientModel, started_backend
from hvd_order.tensorflow.gradients.consumption import consumption_order
from hvd_order.tensorflow.ops import process

__all__ = ["VariableExchange", "close", "close_all", "exchange_of", "gradients_posted"]

_Key = tuple[int, tuple[tuple[int, str, str], ...]]  # process set; variable's id, dtype, format


class VariableExchange:
    """The gradients of some variables in one process set.

    The n-th variable's gradient has position n in the engine's model. An operator also gets the
    variable's handle, so TensorFlow orders it with the readers and writers of this variable only.
    """

    def __init__(
        self, variables: Sequence[Any], gradients: Sequence[Gradient], process_set: int
    ) -> None:
        """Collective.

        Args:
            variables: variables of TensorFlow with fully known shapes.
            gradients: their gradients as sent.

        Raises:
            ModelMismatch: the ranks have gradients of different shapes, dtypes or formats.
            InvalidUsage: gradients are to be encoded and cannot be.
        """
        try:
            self.model: GradientModel = started_backend().register(
                gradients, consumption_order(variables), process_set
            )
        except ModelMismatch as error:
            here = ", ".join(f"{place}: {each.name}" for place, each in enumerate(gradients))
            raise as_both(ModelMismatch, f"{error}. On this rank they are {here}") from None

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Sums over all ranks of one gradient for each variable of the exchange."""
        ops, number = op_library.load().ops, self.model.number
        if not tf.executing_eagerly():
            sums = []
            for position, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
                total = ops.hvd_order_reduce(
                    variable.handle, gradient, exchange=number, position=position
                )
                total.set_shape(gradient.shape)
                sums.append(total)
            return sums
        # A waiting operator blocks an eager program, so all are posted before the first wait.
        try:
            self.post(gradients, variables)
            return self.take([gradient.dtype for gradient in gradients], variables)
        except tf.errors.OpError as error:
            raise translated(error) from error

    def post(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Posts a gradient for each variable; returns before they are summed."""
        ops, number = op_library.load().ops, self.model.number
        for position, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
            ops.hvd_order_post(variable.handle, gradient, exchange=number, position=position)

    def take(self, dtypes: Sequence[tf.DType], variables: Sequence[Any]) -> list[Any]:
        """Takes the sums of the posted gradients. In a graph, each waits only for itself."""
        ops, number = op_library.load().ops, self.model.number
        sums = []
        for position, (variable, dtype) in enumerate(zip(variables, dtypes, strict=True)):
            shape = variable.shape.as_list()
            total = ops.hvd_order_take(
                variable.handle, T=dtype, shape=shape, exchange=number, position=position
            )
            total.set_shape(shape)
            sums.append(total)
        return sums


class _Exchanges:
    """The exchanges of the job; `close_all` ends them with it.

    Attributes:
        by_key: an exchange leaves it when one of its variables is collected.
        posted_before: gradients of exchanges that no longer exist. It counts on over all jobs,
            since callers compare two values of `gradients_posted`.
    """

    def __init__(self) -> None:
        self.by_key: dict[_Key, VariableExchange] = {}
        self.posted_before = 0

    def drop(self, key: _Key) -> None:
        exchange = self.by_key.pop(key, None)
        if exchange is not None:
            self.posted_before += exchange.model.posts
            with contextlib.suppress(HvdOrderError):  # the engine has failed or was shut down
                exchange.model.close()


_exchanges = _Exchanges()


def exchange_of(
    variables: Sequence[Any], gradients: Sequence[Gradient], process_set: int
) -> VariableExchange:
    """The exchange of these variables; the first call for them is collective."""
    pairs = zip(variables, gradients, strict=True)
    key = (process_set, tuple((id(v), g.dtype, g.format) for v, g in pairs))
    if key not in _exchanges.by_key:
        _exchanges.by_key[key] = VariableExchange(variables, gradients, process_set)
        # A graph that can still run keeps its variables. So an exchange that lost one is unused;
        # drop it, since a new variable may get the same id.
        for variable in variables:
            weakref.finalize(variable, _exchanges.drop, key).atexit = False
    return _exchanges.by_key[key]


def close(exchange: VariableExchange) -> None:
    """Ends everything in flight with an error; its variables get a new exchange when needed."""
    for key in [key for key, one in _exchanges.by_key.items() if one is exchange]:
        _exchanges.drop(key)


def gradients_posted() -> int:
    """Number of gradients that this process has posted to the engine since its start."""
    living = list(_exchanges.by_key.values())  # the garbage collector may drop some at any time
    return _exchanges.posted_before + sum(exchange.model.posts for exchange in living)


def close_all() -> None:
    """Ends all exchanges with an error; graphs that refer to them must be traced again."""
    for key in list(_exchanges.by_key):
        _exchanges.drop(key)


process.at_end(close_all)
