"""``DistributedOptimizer`` for Keras 3: the user's own optimizer, with two methods replaced.

Keras 3 has none of the hooks that Horovod 0.28.1 overrides, so an optimizer wrapped by Horovod
trains without any all-reduce. Here gradients are reduced where Keras clips them: after accumulation
and before the norm is taken. Under loss scaling they are reduced before the check for finite
values, since the check decides about the update, and all ranks must decide alike.

The optimizer keeps its class and configuration, so a saved model loads without this package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

from hvd_order.base.errors import HvdOrderError, InvalidUsage
from hvd_order.tensorflow.gradients.deferred import DeferredGradients, NotDeferrable
from hvd_order.tensorflow.gradients.step import GradientReducer, scaled, tensorflow_variable
from hvd_order.tensorflow.keras.fit import change_trainer, say_why_not
from hvd_order.tensorflow.keras.overlap import deferring_step

__all__ = ["is_distributed", "wrap"]

_STATE = "_hvd_order_state"
_HOOKS = (
    "apply",
    "_backend_apply_gradients",
    "_clip_gradients",
    "_get_current_learning_rate",
)


def wrap(
    optimizer: Any,
    reducer: GradientReducer,
    passes: int = 1,
    average_passes: bool = False,
    local: Sequence[Any] = (),
    scale_local: bool = True,
) -> Any:
    """Makes the optimizer combine its gradients over the ranks; returns it.

    Args:
        passes: number of steps whose gradients are summed before the exchange.
        average_passes: divide by the number of passes.
        local: variables whose gradients are not reduced.
        scale_local: divide local gradients by the number of ranks.

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
    GradientReduction(optimizer, reducer, factor, local, scale_local)
    _patch_loss_scaling()
    change_trainer(is_distributed)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether the optimizer, or the one inside, is wrapped."""
    return _reduction_of(getattr(optimizer, "inner_optimizer", optimizer)) is not None


def _reduction_of(optimizer: Any) -> GradientReduction | None:
    state = getattr(optimizer, _STATE, None)
    return None if state is None else state.reduction


def _accumulate(optimizer: Any, passes: int, average: bool) -> float:
    """Makes Keras accumulate gradients as an average; returns the factor that gives the sum."""
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


class GradientReduction:
    """Reduces the gradients of one optimizer, and checks that they were reduced."""

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
        self._done = False  # in the current call of apply()
        self._outside = False  # loss scaling has reduced
        self._rate: Any = None  # the learning rate of deferred updates
        self._apply: Callable[..., Any] = optimizer.apply
        self._current_rate: Callable[[], Any] = optimizer._get_current_learning_rate
        self._backend_apply: Callable[..., Any] = optimizer._backend_apply_gradients
        self._clip: Callable[..., Any] = optimizer._clip_gradients
        optimizer.apply = self.apply
        optimizer._backend_apply_gradients = self.backend_apply
        optimizer._clip_gradients = self.clip
        optimizer._get_current_learning_rate = self.current_rate
        # Keras replaces containers among attributes by copies.
        setattr(optimizer, _STATE, SimpleNamespace(reduction=self))

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Same as the optimizer's method, but may defer; detects unreduced gradients."""
        grads = list(grads)
        if not self._outside and self._deferred(self._optimizer, grads, trainable_variables):
            return None
        self._done = self._outside
        result = self._apply(grads, trainable_variables)
        if not self._done and any(gradient is not None for gradient in grads):
            raise HvdOrderError(
                f"{type(self._optimizer).__name__} was about to apply gradients that were not "
                "summed over the ranks, because it does not apply them as Keras' optimizers do; "
                "use hvd.DistributedGradientTape in a loop of your own"
            )
        return result

    def current_rate(self) -> Any:
        """Same as the optimizer's method, but deferred updates use the rate of their step."""
        return self._current_rate() if self._rate is None else self._rate

    def backend_apply(self, grads: Any, trainable_variables: Any) -> Any:
        """Same as the optimizer's method; stores the variables of the gradients."""
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
        """In eager mode, whether this step only accumulates its gradients."""
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
        """Combines the gradients of all ranks."""
        self._done = True
        results = list(grads)
        shared = [
            i for i, v in enumerate(variables) if id(tensorflow_variable(v)) not in self._local
        ]
        reduced = self._reducer.reduce([results[i] for i in shared], [variables[i] for i in shared])
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        return self._finished(results, variables)

    def _finished(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        own_factor = self._factor
        if self._scale_local:
            own_factor /= len(self._reducer.process_set.ranks)
        return [
            scaled(
                gradient,
                own_factor if id(tensorflow_variable(variable)) in self._local else self._factor,
            )
            for gradient, variable in zip(grads, variables, strict=True)
        ]

    def apply_scaled(self, optimizer: Any, grads: Any, variables: Sequence[Any]) -> Any:
        """Implements apply of a ``LossScaleOptimizer``: reduces before it checks the gradients."""
        grads = list(grads)
        if self._deferred(optimizer, grads, variables):
            return None
        return self.apply_reduced(optimizer, self.reduce(grads, variables), variables)

    def apply_reduced(
        self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], rate: Any = None
    ) -> Any:
        """Applies reduced gradients.

        Args:
            optimizer: this one, or the ``LossScaleOptimizer`` around it.
            rate: learning rate to apply them with, instead of the current one.
        """
        own = self._apply
        if optimizer is not self._optimizer:
            own = functools.partial(_patch_loss_scaling(), optimizer)
        self._outside, self._rate = True, rate
        try:
            return own(grads, list(variables))
        finally:
            self._outside, self._rate = False, None

    def _deferred(self, optimizer: Any, grads: list[Any], variables: Sequence[Any] | None) -> bool:
        """Whether the step being traced defers these gradients to the next step."""
        if not self._reducer.is_collective():
            return False
        step = deferring_step()
        if step is None:
            say_why_not()
            return False
        known = optimizer._trainable_variables if variables is None else list(variables)
        if not optimizer.built:
            with tf.init_scope():
                optimizer.build(known)
        step.defer(self, optimizer, grads, known)
        return True

    def refuse_to_defer(self) -> None:
        """Raises NotDeferrable if the optimizer needs its gradients in the step."""
        if self._optimizer.gradient_accumulation_steps:
            raise NotDeferrable("the optimizer accumulates gradients")
        if type(self._optimizer).apply is not keras.optimizers.Optimizer.apply:
            raise NotDeferrable(f"{type(self._optimizer).__name__} has an apply() of its own")

    def defer(self, grads: Sequence[Any], variables: Sequence[Any], to: DeferredGradients) -> None:
        """Posts gradients, which the next step takes by `taken`."""
        own = {i for i, v in enumerate(variables) if id(tensorflow_variable(v)) in self._local}
        to.post(grads, variables, own)

    def deferred_gradients(self) -> DeferredGradients:
        """Makes the storage of this optimizer's gradients between steps."""
        return DeferredGradients(self._reducer)

    def taken(self, deferred: DeferredGradients) -> list[Any]:
        """Takes the posted gradients, combined."""
        return self._finished(deferred.take(), deferred.sources)


@functools.cache  # once a process
def _patch_loss_scaling() -> Callable[..., Any]:
    """Patches loss scaling, since compile() wraps optimizers for mixed_float16 later.

    Returns:
        Keras' own ``LossScaleOptimizer.apply``.
    """
    own: Callable[..., Any] = keras.optimizers.LossScaleOptimizer.apply

    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        reduction = _reduction_of(self.inner_optimizer)
        if reduction is None:
            return own(self, grads, trainable_variables)
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        return reduction.apply_scaled(self, grads, list(trainable_variables))

    keras.optimizers.LossScaleOptimizer.apply = apply
    return own
