"""Elastic training with Keras: the state, and callbacks that keep it up to date."""

from __future__ import annotations

from typing import Any

import keras

from hvd_order.launch.elastic.state import State
from hvd_order.tensorflow.elastic import TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """State of a model and its optimizer; see `TensorFlowKerasState`."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer=optimizer, **kwargs)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state after every `batches_per_commit` batches, and after each epoch.

    Place it after the callbacks that change the state. A commit waits for the updates of the last
    step, so a commit after every batch prevents all overlap.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        """Creates the callback."""
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Restarts the count, so that all ranks commit at the same batches."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits after every `batches_per_commit` batches."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Stores the number of trained batches of the epoch in ``state.batch``, 0 between epochs.

    Keras does not skip finished batches: give ``fit`` a ``steps_per_epoch`` that is
    ``state.batch`` shorter, as Horovod's examples do.
    """

    def __init__(self, state: Any) -> None:
        """Creates the callback."""
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stores the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Resets the batch to 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Stores in ``state.epoch`` the number of trained epochs over all starts of the job."""

    def __init__(self, state: Any) -> None:
        """Counts from ``state.epoch``."""
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Stores the initial epoch."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Updates the count; Keras counts from 0 in each call of fit."""
        self.state.epoch = self.initial_epoch + epoch + 1
