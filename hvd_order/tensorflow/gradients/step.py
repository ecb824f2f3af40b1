"""Reduces the gradients of a step: dense ones by the engine, the rest by collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvd_order.base.coded_sums import check_coded
from hvd_order.base.errors import InvalidUsage
from hvd_order.base.reduce_op import Adasum, Average, ReduceOp, Sum, choose_op
from hvd_order.tensorflow.backend.interface import Gradient
from hvd_order.tensorflow.gradients.exchange import VariableExchange, exchange_of
from hvd_order.tensorflow.ops.collectives import allreduce
from hvd_order.tensorflow.ops.compression import Compression, Compressor, TensorFlowCodedSums
from hvd_order.tensorflow.ops.process_sets import ProcessSet, global_process_set, number_of

__all__ = ["GradientReducer", "Packed", "SortedOut", "scaled", "tensorflow_variable"]


def tensorflow_variable(source: Any) -> Any:
    """TensorFlow's variable inside a Keras variable; returns other objects unchanged."""
    return getattr(source, "_value", source)


def scaled(gradient: Any, factor: float) -> Any:
    """The gradient times a number; None stays None."""
    if gradient is None or factor == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            scaled(gradient.values, factor), gradient.indices, gradient.dense_shape
        )
    # tf.cast alone would take the number in float32.
    return gradient * tf.cast(tf.constant(factor, tf.float64), gradient.dtype)


@dataclass(frozen=True)
class SortedOut:
    """Gradients of a step, and the places of those for the engine and of the rest."""

    gradients: list[Any]
    engine: list[int]
    others: list[int]


@dataclass(frozen=True)
class Packed:
    """Gradients as sent, and the data to restore them."""

    variables: list[Any]
    wires: list[Any]
    contexts: list[Any]


@dataclass(frozen=True)
class GradientReducer:
    """Combines gradients over the ranks, with the arguments of Horovod's wrappers.

    Attributes:
        op: Average, Sum or Adasum.
        compression: what each gradient goes through.
        gradient_predivide_factor: an average divides by this before the sum, by the rest after.
        sparse_as_dense: exchange ``tf.IndexedSlices`` as dense gradients.
        codes: how the engine's gradients travel in codes, if they do.
    """

    op: ReduceOp = Average
    compression: type[Compressor] | Compressor = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    process_set: ProcessSet = global_process_set
    codes: TensorFlowCodedSums | None = None

    @classmethod
    def checked(
        cls,
        op: int,
        compression: type[Compressor] | Compressor,
        sparse_as_dense: bool,
        gradient_predivide_factor: float,
        process_set: ProcessSet,
    ) -> GradientReducer:
        """Makes a reducer; raises ValueError for inconsistent arguments, as Horovod does."""
        chosen = choose_op(op, None)
        if chosen not in (Average, Sum, Adasum):
            raise InvalidUsage(f"gradients cannot be combined by hvd.{chosen.name}")
        if gradient_predivide_factor != 1.0 and chosen != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        codes = compression if isinstance(compression, TensorFlowCodedSums) else None
        if codes is not None:
            compression = Compression.none
            check_coded(chosen == Adasum, is_allreduce=True)
            if codes.chooses:
                raise InvalidUsage(
                    "Compression.auto chooses by trials, which only hvd_order.torch makes; use "
                    "Compression.int8 where the link is the bottleneck"
                )
        return cls(
            chosen, compression, sparse_as_dense, gradient_predivide_factor, process_set, codes
        )

    @tf.autograph.experimental.do_not_convert
    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Combines the gradients of all ranks.

        Args:
            gradients: tensors, IndexedSlices or None; the same kinds on every rank.
            sources: sources of the gradients: variables of TensorFlow or Keras, or tensors.

        Returns:
            Gradients in the same order; None for no gradient. A rank outside of the
            process set gets its own gradients.
        """
        if not self.is_collective():
            return list(gradients)
        sorted_out = self.sort_out(gradients, sources)
        results = sorted_out.gradients
        for i in sorted_out.others:
            results[i] = self.reduce_one(results[i])
        if sorted_out.engine:
            packed, exchange = self.pack(sorted_out, sources)
            sums = exchange.reduce(packed.wires, packed.variables)
            for i, gradient in zip(sorted_out.engine, self.unpack(packed, sums), strict=True):
                results[i] = gradient
        return results

    def is_collective(self) -> bool:
        """Whether this rank combines gradients with other ranks."""
        if not self.process_set.included():  # as in Horovod
            return False
        number_of(self.process_set)
        return len(self.process_set.ranks) > 1

    def sort_out(self, gradients: Sequence[Any], sources: Sequence[Any]) -> SortedOut:
        """Separates gradients for the engine from those with a collective of their own."""
        results = list(gradients)
        engine: list[int] = []
        others: list[int] = []
        for i, source in enumerate(sources):
            gradient = results[i]
            if gradient is None:
                continue
            if isinstance(gradient, tf.IndexedSlices) and self.sparse_as_dense:
                gradient = results[i] = tf.convert_to_tensor(gradient)
            is_for_engine = self._is_for_engine(gradient, tensorflow_variable(source))
            (engine if is_for_engine else others).append(i)
        return SortedOut(results, engine, others)

    def pack(
        self, sorted_out: SortedOut, sources: Sequence[Any]
    ) -> tuple[Packed, VariableExchange]:
        """Packs the gradients for the engine and finds their exchange. Collective if it is new."""
        variables = [tensorflow_variable(sources[i]) for i in sorted_out.engine]
        pairs = [
            self.compression.compress(self._predivided(sorted_out.gradients[i]))
            for i in sorted_out.engine
        ]
        packed = Packed(variables, [wire for wire, _ in pairs], [context for _, context in pairs])
        described = [
            self._described(sources[i], variable.shape, wire.dtype.name)
            for i, variable, wire in zip(sorted_out.engine, variables, packed.wires, strict=True)
        ]
        return packed, exchange_of(variables, described, number_of(self.process_set))

    def _described(self, source: Any, shape: Any, dtype: str) -> Gradient:
        name = getattr(source, "path", source.name)
        format_ = self.codes.format_of(name, shape.rank, dtype) if self.codes else ""
        return Gradient(name, tuple(shape.as_list()), dtype, format_)

    def unpack(self, packed: Packed, sums: Sequence[Any]) -> list[Any]:
        """Restores gradients from the sums of the packed ones."""
        return [
            self._averaged(self.compression.decompress(total, context))
            for total, context in zip(sums, packed.contexts, strict=True)
        ]

    def _is_for_engine(self, gradient: Any, variable: Any) -> bool:
        """Whether it is dense, of a variable, and of a size known during tracing."""
        return (
            self.op != Adasum
            and not isinstance(gradient, tf.IndexedSlices)
            and isinstance(variable, tf.Variable)
            and variable.shape.is_fully_defined()
            and gradient.shape == variable.shape
            and gradient.dtype.is_floating
        )

    def reduce_one(self, gradient: Any) -> Any:
        """Reduces a gradient without the engine, by a collective of its own."""
        if isinstance(gradient, tf.IndexedSlices):
            return allreduce(gradient, op=self.op, process_set=self.process_set)
        reduced = allreduce(
            self._predivided(gradient),
            op=Sum if self.op == Average else self.op,
            compression=self.compression,
            process_set=self.process_set,
        )
        return self._averaged(reduced)

    def _predivided(self, gradient: Any) -> Any:
        return scaled(gradient, 1.0 / self.gradient_predivide_factor)

    def _averaged(self, total: Any) -> Any:
        if self.op != Average:
            return total
        return scaled(total, self.gradient_predivide_factor / len(self.process_set.ranks))
