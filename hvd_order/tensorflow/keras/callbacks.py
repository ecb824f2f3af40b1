"""Callbacks for ``model.fit``, with Horovod's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from hvd_order.base.errors import HvdOrderError
from hvd_order.tensorflow.gradients.exchange import gradients_posted
from hvd_order.tensorflow.gradients.step import tensorflow_variable
from hvd_order.tensorflow.keras.fit import optimizers_of
from hvd_order.tensorflow.keras.optimizer import is_distributed
from hvd_order.tensorflow.ops import process
from hvd_order.tensorflow.ops.collectives import allreduce
from hvd_order.tensorflow.ops.functions import broadcast_variables
from hvd_order.tensorflow.ops.requests import reductions_started

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


def _exchanges() -> int:
    """Number of exchanges that this process has started."""
    return gradients_posted() + reductions_started()


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Starts training from one rank's variables: the model's and the optimizer's.

    The broadcast runs before the first batch, or after it for variables that do not exist before.
    The callback raises after an epoch in which no gradient was exchanged.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        """Creates the callback.

        Args:
            root_rank: rank whose variables are broadcast.
            device: accepted for compatibility with Horovod.
            local_variables: variables to exclude.
        """
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local = [tensorflow_variable(variable) for variable in local_variables or ()]
        self._begun_with = 0
        self._exchanged = 0

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable from the broadcast."""
        self._local.append(tensorflow_variable(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts if the model is built."""
        if not self.model.built:
            return
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts variables that now exist."""
        self._exchanged = _exchanges()
        self._broadcast()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to count exchanges."""
        self._begun_with = self._exchanged = _exchanges()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Checks that gradients were exchanged.

        Raises:
            HvdOrderError: none was, though the model trains without a DistributedOptimizer.
        """
        if (
            process.size() > 1
            and self.model.optimizer is not None
            and self.model.trainable_weights
            and not any(map(is_distributed, optimizers_of(self.model)))
            and self._exchanged == self._begun_with
        ):
            raise HvdOrderError(
                "an epoch has passed without a single exchange of gradients: every rank trains a "
                "model of its own. Wrap the optimizer before compile(): "
                "model.compile(optimizer=hvd.DistributedOptimizer(optimizer), ...)"
            )

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        self.broadcast_done = True
        variables = list(self.model.weights)  # without seeds: dropout differs between ranks
        known = {id(variable) for variable in variables}
        for optimizer in dict.fromkeys(optimizers_of(self.model)):
            variables += [v for v in optimizer.variables if id(v) not in known]
        local = {id(variable) for variable in self._local}
        broadcast_variables(
            [v for v in variables if id(tensorflow_variable(v)) not in local], self.root_rank
        )


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over the ranks, for the callbacks that follow it."""

    def __init__(self, device: str = "") -> None:
        """Creates the callback.

        Args:
            device: accepted for compatibility with Horovod.
        """
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replaces the values in `logs`."""
        if not logs:
            return
        names = sorted(logs)
        averaged = allreduce(
            tf.constant([float(logs[name]) for name in names], tf.float64),
            name=f"metrics {' '.join(names)}",
        ).numpy()
        logs.update(zip(names, map(float, averaged), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies the initial learning rate by a function of the epoch."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Creates the callback.

        Args:
            initial_lr: learning rate at the beginning of `start_epoch`.
            multiplier: a function of the epoch, or a constant for exponential decay.
            start_epoch: first epoch whose rate is changed.
            end_epoch: first epoch after the changes.
            staircase: change it once an epoch, else with every batch.
            momentum_correction: accepted, but unused. Keras 3 fixes the momentum when it
                traces the step, so it cannot be corrected for a batch; a warning says so when the
                rate of an optimizer with momentum changes within an epoch.
            steps_per_epoch: number of steps, if Keras cannot determine it.
        """
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Determines the number of steps of an epoch."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the "
                    f"steps_per_epoch parameter to the {type(self).__name__}()."
                )
        if self.momentum_correction and not self.staircase and self._momentum():
            warnings.warn(
                "momentum correction is not possible with Keras 3, which fixes the momentum when "
                "it traces the step; pass momentum_correction=False to silence this",
                RuntimeWarning,
                stacklevel=2,
            )

    def _momentum(self) -> float:
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        return float(getattr(optimizer, "momentum", 0.0) or 0.0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Stores the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Changes the rate."""
        if self.current_epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self.current_epoch >= self.end_epoch:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.current_epoch)

    def _set(self, epoch: float) -> None:
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Logs the rate."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from that of one process to that of all processes over some epochs.

    See Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Creates the callback.

        Args:
            initial_lr: final rate: that of one process times the number of ranks.
            warmup_epochs: number of epochs of the rise.
            momentum_correction, steps_per_epoch: see `LearningRateScheduleCallback`.
            verbose: with 1, rank 0 prints a line at the end of the rise.
        """

        def multiplier(epoch: float) -> float:
            # One batch further, so that epochs end at round numbers.
            assert self.steps_per_epoch is not None
            epoch += 1.0 / self.steps_per_epoch
            return (epoch * (process.size() - 1) / warmup_epochs + 1) / process.size()

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Logs the rate."""
        super().on_epoch_end(epoch, logs)
        last = self.end_epoch is not None and epoch == self.end_epoch - 1
        if last and self.verbose > 0 and process.rank() == 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}."
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model so far, to the path that is set as ``filepath`` before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str = "epoch",
    ) -> None:
        """Same arguments as ``keras.callbacks.ModelCheckpoint``."""
        super().__init__(
            filepath="best.weights.h5" if save_weights_only else "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
