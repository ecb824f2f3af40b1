"""``DistributedOptimizer`` for Keras 3: the user's own optimizer, with two methods replaced.

Keras 3 has none of the hooks that Horovod 0.28.1 overrides, which is why an optimizer wrapped by
that trains without a single all-reduce. Gradients are reduced where Keras clips them: after it has
accumulated them, before the norm is taken. Under loss scaling they are reduced before it looks
whether they are finite, since that decides about the update, and ranks must decide alike.

The optimizer stays an instance of its class, with its configuration: what is saved can be loaded
without this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

from hvd_order.errors import HvdOrderError, InvalidUsage
from hvd_order.tensorflow.gradients import GradientReducer, scaled, tensorflow_variable

__all__ = ["is_distributed", "wrap"]

_STATE = "_hvd_order_state"
_HOOKS = ("apply", "_backend_apply_gradients", "_clip_gradients")


def wrap(
    optimizer: Any,
    reducer: GradientReducer,
    passes: int = 1,
    average_passes: bool = False,
    local: Sequence[Any] = (),
    scale_local: bool = True,
) -> Any:
    """Has the optimizer combine its gradients over the ranks; returns it.

    Args:
        passes: steps whose gradients are added up before they are exchanged.
        average_passes: divide by them.
        local: variables whose gradients stay each rank's own.
        scale_local: divide those by the number of ranks.

    Raises:
        InvalidUsage: not an optimizer of Keras 3 on TensorFlow, or one that is wrapped already.
    """
    if keras.backend.backend() != "tensorflow":
        raise InvalidUsage(
            f"Keras runs on {keras.backend.backend()} here; set KERAS_BACKEND=tensorflow before "
            "keras is imported (for PyTorch see hvd_order.torch)"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        wrap(optimizer.inner_optimizer, reducer, passes, average_passes, local, scale_local)
        return optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidUsage(
            f"expected an optimizer of Keras 3, got {type(optimizer).__module__}."
            f"{type(optimizer).__name__}"
        )
    missing = [hook for hook in _HOOKS if not callable(getattr(optimizer, hook, None))]
    if missing:
        raise InvalidUsage(
            f"Keras {keras.__version__} has no Optimizer.{missing[0]}, where gradients are "
            "reduced; use hvd.DistributedGradientTape in a loop of your own"
        )
    if is_distributed(optimizer):
        raise InvalidUsage("this optimizer is a DistributedOptimizer already")
    factor = _accumulate(optimizer, passes, average_passes)
    _Reduction(optimizer, reducer, factor, local, scale_local)
    _patch_loss_scaling()
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether the optimizer, or the one inside, is wrapped."""
    return _reduction_of(getattr(optimizer, "inner_optimizer", optimizer)) is not None


def _reduction_of(optimizer: Any) -> _Reduction | None:
    state = getattr(optimizer, _STATE, None)
    return None if state is None else state.reduction


def _accumulate(optimizer: Any, passes: int, average: bool) -> float:
    """Lets Keras add up gradients, which it averages; returns what makes a sum of that."""
    if passes == 1:
        return 1.0
    if optimizer.built:
        raise InvalidUsage(
            "backward_passes_per_step must be given before the optimizer is built, that is before "
            "the first step and before compile() of a built model"
        )
    own = optimizer.gradient_accumulation_steps
    if own not in (None, passes):
        raise InvalidUsage(
            f"backward_passes_per_step is {passes}, and the optimizer's own "
            f"gradient_accumulation_steps {own}; give one of them"
        )
    optimizer.gradient_accumulation_steps = passes
    return 1.0 if average else float(passes)


class _Reduction:
    """Where the gradients of one optimizer are reduced, and the proof that they were."""

    def __init__(
        self,
        optimizer: Any,
        reducer: GradientReducer,
        factor: float,
        local: Sequence[Any],
        scale_local: bool,
    ) -> None:
        self._optimizer = optimizer
        self._reducer = reducer
        self._factor = factor
        self._local = {id(tensorflow_variable(variable)): variable for variable in local}
        self._scale_local = scale_local
        self._variables: Sequence[Any] = ()
        self._done = False  # in the call of apply() that is under way
        self._outside = False  # loss scaling has done it before
        self._apply: Callable[..., Any] = optimizer.apply
        self._backend_apply: Callable[..., Any] = optimizer._backend_apply_gradients
        self._clip: Callable[..., Any] = optimizer._clip_gradients
        optimizer.apply = self.apply
        optimizer._backend_apply_gradients = self.backend_apply
        optimizer._clip_gradients = self.clip
        # Keras replaces containers among attributes by copies of its own.
        setattr(optimizer, _STATE, SimpleNamespace(reduction=self))

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """As the optimizer's own; finds gradients that were not reduced."""
        grads = list(grads)
        self._done = self._outside
        result = self._apply(grads, trainable_variables)
        if not self._done and any(gradient is not None for gradient in grads):
            raise HvdOrderError(
                f"{type(self._optimizer).__name__} was about to apply gradients that were not "
                "summed over the ranks, because it does not apply them as Keras' optimizers do; "
                "use hvd.DistributedGradientTape in a loop of your own"
            )
        return result

    def backend_apply(self, grads: Any, trainable_variables: Any) -> Any:
        """As the optimizer's own; remembers whose gradients come."""
        for variable in trainable_variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise InvalidUsage(
                    f"'{variable.path}' is overwritten by its gradient, which differs between "
                    "ranks; quantized training is not supported"
                )
        self._variables = list(trainable_variables)
        if self._accumulates_only():
            self._done = True
        return self._backend_apply(grads, trainable_variables)

    def _accumulates_only(self) -> bool:
        """In eager mode, whether this step only adds its gradients to those of others."""
        steps = self._optimizer.gradient_accumulation_steps
        return bool(
            steps
            and tf.executing_eagerly()
            and (int(self._optimizer._iterations.numpy()) + 1) % steps != 0
        )

    def clip(self, grads: Any) -> Any:
        """Reduces, then clips."""
        if not self._outside:
            grads = self.reduce(grads, self._variables)
        return self._clip(grads)

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks, combined."""
        self._done = True
        results = list(grads)
        local = [id(tensorflow_variable(variable)) in self._local for variable in variables]
        shared = [i for i, is_local in enumerate(local) if not is_local]
        reduced = self._reducer.reduce([results[i] for i in shared], [variables[i] for i in shared])
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        own_factor = self._factor
        if self._scale_local:
            own_factor /= len(self._reducer.process_set.ranks)
        return [
            scaled(gradient, own_factor if is_local else self._factor)
            for gradient, is_local in zip(results, local, strict=True)
        ]

    def before_finite_test(
        self, grads: Any, variables: Any, then: Callable[[list[Any]], Any]
    ) -> Any:
        """Reduces, and calls `then`, inside which nothing is reduced again."""
        reduced = self.reduce(grads, variables)
        self._outside = True
        try:
            return then(reduced)
        finally:
            self._outside = False


_own_loss_scale_apply: Callable[..., Any] | None = None


def _patch_loss_scaling() -> None:
    """Once a process: compile() wraps optimizers for mixed_float16 by itself, and later."""
    global _own_loss_scale_apply
    if _own_loss_scale_apply is not None:
        return
    own = _own_loss_scale_apply = keras.optimizers.LossScaleOptimizer.apply

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        reduction = _reduction_of(self.inner_optimizer)
        if reduction is None:
            return own(self, grads, trainable_variables)
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        variables = list(trainable_variables)
        return reduction.before_finite_test(
            list(grads), variables, lambda reduced: own(self, reduced, variables)
        )

    keras.optimizers.LossScaleOptimizer.apply = apply
