"""Elastic training with Horovod's names: ``hvd.elastic.run``, ``TensorFlowKerasState``.

When a worker dies or a host joins, the elastic agent (``hvd-order run --min-np``, torchrun) starts
all workers again, and training continues from the last commit; see docs/guides/elastic.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_order.base.errors import HorovodInternalError, HostsUpdatedInterrupt, HvdOrderError
from hvd_order.launch.elastic.run import rejoin, run_fn
from hvd_order.launch.elastic.state import ObjectState, State
from hvd_order.tensorflow.backend.failures import translated
from hvd_order.tensorflow.ops.functions import (
    allgather_object,
    broadcast_object,
    broadcast_variables,
)
from hvd_order.tensorflow.ops.process import init, rank, shutdown, size

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


# Name of collectives: a call on some of the ranks never meets another collective of the program.
_STATE = "elastic state"


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the training function of an elastic job.

    Before `func` starts, all ranks get the same state: that of the last commit, or rank 0's before
    the first commit. The script must not call a collective before `func`, and must create model,
    optimizer and state at each start.

    Args:
        func: takes the `State` as first argument, and trains from that state.

    Returns:
        A function with the same arguments, which returns what `func` returns.
    """

    @functools.wraps(func)
    def raising_ours(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except HvdOrderError:
            raise
        except tf.errors.OpError as error:
            raise translated(error) from error

    return run_fn(raising_ours, _reset)


def _reset() -> None:
    rejoin(size(), shutdown, init)


class TensorFlowState(ObjectState):
    """State of a list of variables; every further keyword becomes an attribute.

    Args:
        variables: variables of TensorFlow or Keras, in the same order on every rank.
        session: accepted for compatibility with Horovod.
        kwargs: picklable objects (epoch, batch, ...).

    Raises:
        ValueError: no variables are given; TensorFlow 2 has no list of all variables.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if not variables:
            raise ValueError(
                "TensorFlow 2 keeps no list of all variables: name those of the state, say "
                "TensorFlowState(model.variables)"
            )
        self.variables = list(variables)
        self._values: list[Any] = []
        self.session = session
        self._save_variables()
        super().__init__(
            bcast_object=functools.partial(broadcast_object, name=_STATE),
            get_rank=rank,
            allgather_object=functools.partial(allgather_object, name=_STATE),
            **kwargs,
        )

    def save(self) -> None:
        """See `hvd_order.launch.elastic.State.save`."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """See `hvd_order.launch.elastic.State.restore`."""
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """See `hvd_order.launch.elastic.State.sync`."""
        broadcast_variables(self.variables, root_rank=0)
        self._save_variables()  # else restore() would return to the state before this rank joined
        super().sync()

    def saved(self) -> Any:
        """See `hvd_order.launch.elastic.State.saved`."""
        return self._values, super().saved()

    def set_saved(self, saved: Any) -> None:
        """See `hvd_order.launch.elastic.State.set_saved`.

        Raises:
            ValueError: the commit has other variables.
        """
        values, objects = saved
        found, expected = [[one.shape for one in each] for each in (values, self._values)]
        if found != expected:
            raise ValueError(
                f"the last commit has {len(found)} variables of shapes {found}, this program "
                f"{len(expected)} of shapes {expected}: it is another model's, or its optimizer "
                "was not built yet (optimizer.build(model.trainable_variables))"
            )
        self._values = values
        super().set_saved(objects)

    def _save_variables(self) -> None:
        self._values = [variable.numpy() for variable in self.variables]


class TensorFlowKerasState(TensorFlowState):
    """State of a model and its optimizer; every further keyword becomes an attribute.

    Random seeds, such as those of dropout, stay specific to each rank.

    Args:
        model: a built model of Keras 3.
        optimizer: the optimizer; None: the one that the model is compiled with.
        backend: accepted for compatibility with Horovod.
        kwargs: picklable objects (epoch, batch, ...).

    Raises:
        ValueError: the model is not built, or there is no optimizer.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        optimizer = optimizer or getattr(model, "optimizer", None)
        if optimizer is None:
            raise ValueError("the model is not compiled: give its optimizer")
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self.model, self.optimizer, self.backend = model, optimizer, backend
        weights = list(model.weights)
        known = {id(weight) for weight in weights}
        super().__init__(
            [*weights, *(v for v in optimizer.variables if id(v) not in known)], **kwargs
        )
