"""Gradients that one execution of a traced step posts and a later execution takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from hvd_order.tensorflow.gradients.exchange import VariableExchange, close
from hvd_order.tensorflow.gradients.step import GradientReducer, Packed

__all__ = ["DeferredGradients", "NotDeferrable"]


class NotDeferrable(Exception):  # noqa: N818  (no error: the step works otherwise)
    """Reason why the updates of a step cannot be deferred; the text ends a sentence."""


class _KeptGradient:
    """A gradient that does not use the engine, kept in variables until the next step."""

    def __init__(self, gradient: Any) -> None:
        self.sparse = isinstance(gradient, tf.IndexedSlices)
        parts = [gradient.values, gradient.indices] if self.sparse else [gradient]
        self._variables = []
        for part in parts:
            shape = part.shape
            if self.sparse and shape.rank:  # the number of rows depends on the batch
                shape = tf.TensorShape([None, *shape[1:]])
            beginning = [length or 0 for length in shape.as_list()] if shape.rank else []
            with tf.init_scope():
                self._variables.append(
                    tf.Variable(tf.zeros(beginning, part.dtype), trainable=False, shape=shape)
                )

    def put(self, gradient: Any) -> None:
        parts = [gradient.values, gradient.indices] if self.sparse else [gradient]
        for variable, part in zip(self._variables, parts, strict=True):
            variable.assign(part)

    def get(self, source: Any) -> Any:
        values = [variable.read_value() for variable in self._variables]
        if not self.sparse:
            return values[0]
        return tf.IndexedSlices(values[0], values[1], tf.constant(source.shape.as_list(), tf.int64))


class DeferredGradients:
    """Gradients that `post` leaves for `take`, in either order of tracing.

    Dense gradients travel in the meantime. Sparse gradients are combined at once and kept, since
    the next step needs their variables first.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._kinds: list[str] = []
        self._sources: list[Any] = []
        self._engine: list[int] = []
        self._packed: Packed
        self._dtypes: list[tf.DType] = []
        self._exchange: VariableExchange
        self._held: dict[int, _KeptGradient] = {}

    def post(self, gradients: Sequence[Any], sources: Sequence[Any], own: Collection[int]) -> None:
        """Posts the gradients; each trace of the step calls it with equal gradients.

        Args:
            own: places of gradients that are not reduced.

        Raises:
            NotDeferrable: these gradients have to be applied in this step.
        """
        reducer = self._reducer
        shared = [i for i in range(len(sources)) if i not in own]
        sorted_out = reducer.sort_out([gradients[i] for i in shared], [sources[i] for i in shared])
        if not sorted_out.engine:
            raise NotDeferrable("no gradient is dense and of a known size")
        packed, exchange = reducer.pack(sorted_out, [sources[i] for i in shared])
        if any(tf.is_tensor(part) for part in tf.nest.flatten(packed.contexts)):
            raise NotDeferrable("its compression keeps tensors of the step")
        held = {i: gradients[i] for i in own if gradients[i] is not None}
        held.update(
            (shared[i], reducer.reduce_one(sorted_out.gradients[i])) for i in sorted_out.others
        )
        engine = [shared[i] for i in sorted_out.engine]
        kinds = [_kind(i, engine, held) for i in range(len(sources))]
        if not self._kinds:
            self._kinds, self._sources, self._engine = kinds, list(sources), engine
            self._dtypes = [wire.dtype for wire in packed.wires]
            self._packed = Packed(packed.variables, [], packed.contexts)  # no tensors of a graph
            self._exchange = exchange
            self._held = {i: _KeptGradient(gradient) for i, gradient in held.items()}
        elif (
            kinds != self._kinds
            or exchange is not self._exchange
            or any(a is not b for a, b in zip(sources, self._sources, strict=True))
        ):
            raise NotDeferrable("its gradients are not of the same kind in every step")
        exchange.post(packed.wires, packed.variables)
        for i, gradient in held.items():
            self._held[i].put(gradient)

    def take(self) -> list[Any]:
        """Takes the combined gradients in the order of the sources; None for no gradient."""
        results: list[Any] = [None] * len(self._kinds)
        sums = self._exchange.take(self._dtypes, self._packed.variables)
        for i, gradient in zip(self._engine, self._reducer.unpack(self._packed, sums), strict=True):
            results[i] = gradient
        for i, held in self._held.items():
            results[i] = held.get(self._sources[i])
        return results

    @property
    def sources(self) -> list[Any]:
        """Sources of the gradients."""
        return self._sources

    def close(self) -> None:
        """Discards gradients that have not been taken."""
        close(self._exchange)


def _kind(place: int, engine: Sequence[int], held: dict[int, Any]) -> str:
    if place in engine:
        return "dense"
    if place not in held:
        return "none"
    return "slices" if isinstance(held[place], tf.IndexedSlices) else "other"
