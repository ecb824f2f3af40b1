"""``model.fit`` with deferred updates.

Keras makes the function of a step in `make_train_function`. For a model with a DistributedOptimizer
this module replaces that function by an overlapping one. It changes Keras' class once a process, at
the first DistributedOptimizer, since an optimizer has no reference to its model.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvd_order.tensorflow.backend.failures import translated
from hvd_order.tensorflow.backend.interface import started_backend
from hvd_order.tensorflow.gradients import deferred_updates
from hvd_order.tensorflow.keras.overlap import OverlappedStep

__all__ = ["change_trainer", "optimizers_of", "say_why_not"]

_log = logging.getLogger("hvd_order")


class _TrainFunction:
    """Function that ``fit`` calls for each batch; ``train_on_batch`` does not defer updates."""

    def __init__(self, model: Any, within: Callable[[Any], Any]) -> None:
        self._model = model
        self._within = within
        self._steps = 1  # of the current call
        self._overlapped = OverlappedStep(
            model.train_step, model._make_function, self._whole_call_within
        )

    def __call__(self, iterator: Any) -> Any:
        try:
            return self._step(iterator)
        except tf.errors.OpError as error:
            known = translated(error)
            if known is error:
                raise
            # A graph's error hides the cause below some fifty lines of operators.
            raise known from None

    def _step(self, iterator: Any) -> Any:
        if not any(model is self._model for model in _fitting):
            deferred_updates.flush()
            return self._within(iterator)
        self._steps = self._model.steps_per_execution
        if (
            self._steps == 1
            or self._overlapped.is_refused()
            or self._overlapped in deferred_updates.pending
        ):
            return self._overlapped(iterator)
        return self._one_by_one(iterator)

    def _one_by_one(self, iterator: Any) -> Any:
        """Runs single steps: the several steps of one call all need a step before them."""
        outputs = None
        self._model.steps_per_execution = 1
        try:
            for step in range(self._steps):
                self._overlapped.flush()
                try:
                    outputs = self._overlapped(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    if step == 0:
                        raise
                    break
                if self._overlapped.is_refused():  # and has run a whole call
                    break
        finally:
            self._model.steps_per_execution = self._steps
        return outputs

    def _whole_call_within(self, iterator: Any) -> Any:
        """A call as in Keras: its number of steps is fixed during tracing."""
        self._model.steps_per_execution = self._steps
        return self._within(iterator)


def optimizers_of(model: Any) -> list[Any]:
    """Optimizers among a model's attributes; adversarial networks, for example, have several."""
    found = []
    for value in vars(model).values():
        several = value.values() if isinstance(value, dict) else value
        parts = several if isinstance(value, (dict, list, tuple)) else [value]
        found += [one for one in parts if isinstance(one, keras.optimizers.Optimizer)]
    return found


def say_why_not() -> None:
    """Logs why a DistributedOptimizer cannot defer its updates where it is being traced.

    A model with our train function has logged the reason; other models hide the optimizer.
    """
    if not _fitting or _fitting[-1] in _told or tf.executing_eagerly():
        return
    model = _fitting[-1]
    if (
        not isinstance(model.train_function, _TrainFunction)
        and started_backend().config().cross_iteration
    ):
        _told.add(model)
        _log.info(
            "updates are applied within each step, not while the next one runs: the "
            "DistributedOptimizer is no attribute of %s, so it is not found before fit() begins",
            type(model).__name__,
        )


_fitting: list[Any] = []  # models whose fit() is running
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def change_trainer(is_distributed: Callable[[Any], bool]) -> None:
    """Makes models with a DistributedOptimizer overlap; a second call does nothing."""
    trainer = next(c for c in keras.Model.__mro__ if "make_train_function" in vars(c))
    if hasattr(trainer.make_train_function, "_hvd_changes"):
        return
    own_make, own_fit = trainer.make_train_function, trainer.fit

    @functools.wraps(own_make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        distributed = any(map(is_distributed, optimizers_of(self)))
        if distributed and self.jit_compile:
            _log.warning(
                "XLA has no operators that communicate, so this model is trained without "
                "(jit_compile=False in compile() says the same)"
            )
            self.jit_compile = False  # before Keras makes the function
        before = self.train_function
        own_make(self, force)
        if self.train_function is before or not distributed:
            return self.train_function
        # A single process has nothing to wait for.
        overlaps = started_backend().size() > 1 and started_backend().config().cross_iteration
        if overlaps and not self.run_eagerly:
            self.train_function = _TrainFunction(self, self.train_function)
        return self.train_function

    @functools.wraps(own_fit)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        _fitting.append(self)
        try:
            result = own_fit(self, *args, **kwargs)
        finally:
            _fitting.pop()
        deferred_updates.flush()
        return result

    make_train_function._hvd_changes = True  # type: ignore[attr-defined]
    trainer.make_train_function, trainer.fit = make_train_function, fit
    for name in ("test", "predict"):
        make = f"make_{name}_function"
        setattr(trainer, make, _flushing(getattr(trainer, make), f"{name}_function"))


def _flushing(own_make: Callable[..., Any], attribute: str) -> Callable[..., Any]:
    """Wraps a maker of functions so that they apply deferred updates before they run."""

    @functools.wraps(own_make)
    def make(self: Any, force: bool = False) -> Any:
        before = getattr(self, attribute)
        own_make(self, force)
        own = getattr(self, attribute)
        if own is not before:

            @functools.wraps(own)
            def function(*args: Any, **kwargs: Any) -> Any:
                deferred_updates.flush()
                return own(*args, **kwargs)

            setattr(self, attribute, function)
        return getattr(self, attribute)

    return make
