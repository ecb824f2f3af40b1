"""``DistributedGradientTape``: a GradientTape whose gradients are combined over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_order.base.reduce_op import Average
from hvd_order.tensorflow.gradients.step import GradientReducer, scaled, tensorflow_variable
from hvd_order.tensorflow.ops.compression import Compression, Compressor
from hvd_order.tensorflow.ops.process_sets import ProcessSet, global_process_set

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape", "check_groups"]


class _DistributedTape(tf.GradientTape):
    """The methods that `DistributedGradientTape` adds to the class of the user's tape."""

    _hvd_reducer: GradientReducer
    _hvd_scale_local: bool
    _hvd_local: dict[int, Any]

    def register_local_source(self, source: Any) -> None:
        """Excludes the gradients of `source` from the reduction."""
        self._hvd_local[id(tensorflow_variable(source))] = source

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Combined gradients of all ranks; arguments as in ``tf.GradientTape.gradient``."""
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat_sources = tf.nest.flatten(sources)
        flat = tf.nest.flatten(gradients)
        local = [id(tensorflow_variable(s)) in self._hvd_local for s in flat_sources]
        shared = [i for i, is_local in enumerate(local) if not is_local]
        reduced = self._hvd_reducer.reduce(
            [flat[i] for i in shared], [flat_sources[i] for i in shared]
        )
        for i, gradient in zip(shared, reduced, strict=True):
            flat[i] = gradient
        if self._hvd_scale_local:
            count = len(self._hvd_reducer.process_set.ranks)
            flat = [
                scaled(gradient, 1.0 / count) if is_local else gradient
                for gradient, is_local in zip(flat, local, strict=True)
            ]
        return tf.nest.pack_sequence_as(gradients, flat)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Pairs (source, gradient) of the local sources, and of all other sources."""
        gradients = self.gradient(target, sources, output_gradients)
        pairs = list(zip(sources, gradients, strict=True))
        local = [p for p in pairs if id(tensorflow_variable(p[0])) in self._hvd_local]
        shared = [p for p in pairs if id(tensorflow_variable(p[0])) not in self._hvd_local]
        return local, shared


def DistributedGradientTape(  # noqa: N802  (Horovod's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape like `gradtape`, of its class, whose ``gradient`` combines the ranks' gradients.

    The gradients of variables use the engine; sparse gradients and those of other tensors use
    `allreduce`.

    Args:
        gradtape: the tape, before or after recording.
        device_dense, device_sparse: accepted for compatibility with Horovod.
        compression: compression of the gradients.
        sparse_as_dense: exchange ``tf.IndexedSlices`` as dense gradients.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: an average divides by this before the sum, by the rest after.
        num_groups, groups: fusion groups of Horovod; no effect here.
        process_set: ranks that take part.
        scale_local_gradients: divide gradients of local sources by the number of ranks.

    Raises:
        ValueError: the arguments are inconsistent.
    """
    check_groups(num_groups, groups)
    reducer = GradientReducer.checked(
        op, compression, sparse_as_dense, gradient_predivide_factor, process_set
    )
    own: Any = type(gradtape)
    bases = (_DistributedTape,) if own is tf.GradientTape else (_DistributedTape, own)
    made: Any = type(own.__name__, bases, {})
    tape = made.__new__(made)
    tape.__dict__.update(gradtape.__dict__)  # continues the same recording
    tape._hvd_reducer = reducer
    tape._hvd_scale_local = scale_local_gradients
    tape._hvd_local = {}
    return tape


def PartialDistributedGradientTape(  # noqa: N802  (Horovod's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedGradientTape` that does not reduce the gradients of some layers.

    Args:
        local_layers: one or more Keras layers.
    """
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for layer in tf.nest.flatten(local_layers if local_layers is not None else []):
        if not hasattr(layer, "trainable_weights"):
            raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def check_groups(num_groups: int, groups: int | list[list[Any]] | None) -> None:
    """Raises ValueError for arguments that Horovod rejects."""
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`.",
            DeprecationWarning,
            stacklevel=3,
        )
    if groups is not None and not isinstance(groups, list) and groups <= 0:
        raise ValueError(
            "groups should be a non-negative integer or a list of list of tf.Variable."
        )
