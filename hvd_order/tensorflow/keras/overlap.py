"""A step with deferred updates, which the next step applies while other gradients travel.

Step t only posts its gradients. Step t + 1 begins with the update of every variable. Each update
names its variable's handle, so TensorFlow makes the first read of a variable wait for the update of
that variable alone, and the step starts when the first layer's gradient has arrived. Each forward
pass uses the same weights as without deferral; nothing is stale.

The step is traced twice: as the first step, and as a step that follows another.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import tensorflow as tf

from hvd_order.base.errors import HvdOrderError
from hvd_order.tensorflow.backend.failures import translated
from hvd_order.tensorflow.backend.interface import started_backend
from hvd_order.tensorflow.gradients import deferred_updates
from hvd_order.tensorflow.gradients.deferred import DeferredGradients, NotDeferrable
from hvd_order.tensorflow.gradients.step import tensorflow_variable

__all__ = ["OverlappedStep", "deferring_step", "overlapped_function"]

_log = logging.getLogger("hvd_order")


class Deferring(Protocol):
    """Interface to an optimizer (keras/optimizer.py)."""

    def refuse_to_defer(self) -> None: ...
    def deferred_gradients(self) -> DeferredGradients: ...
    def defer(
        self, grads: Sequence[Any], variables: Sequence[Any], to: DeferredGradients
    ) -> None: ...
    def taken(self, deferred: DeferredGradients) -> list[Any]: ...
    def current_rate(self) -> Any: ...
    def apply_reduced(
        self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], rate: Any
    ) -> Any: ...


class _PostedUpdate:
    """Update of one optimizer: posted in one step, applied in the next."""

    def __init__(self, reduction: Deferring, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.gradients = reduction.deferred_gradients()
        self._reduction = reduction
        self._rate: Any = None  # variable of the type that the rate has

    def post(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        self._reduction.defer(grads, variables, self.gradients)
        # Callbacks may change the learning rate before these are applied. At the end of the data
        # nothing may be assigned.
        with tf.control_dependencies([g for g in tf.nest.flatten(grads) if g is not None]):
            rate = tf.convert_to_tensor(self._reduction.current_rate())
            if self._rate is None:
                with tf.init_scope():
                    self._rate = tf.Variable(tf.zeros([], rate.dtype), trainable=False)
            self._rate.assign(rate)

    def apply(self) -> None:
        grads = self._reduction.taken(self.gradients)
        rate = self._rate.read_value()
        self._reduction.apply_reduced(self.optimizer, grads, self.gradients.sources, rate)

    def variables(self) -> list[Any]:
        """All variables that an update changes."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        own = [*self.optimizer.variables, *inner.variables]
        rate = getattr(inner, "_learning_rate", None)
        return [*self.gradients.sources, *(v for v in own if v is not rate)]


class _StepTrace:
    """A step being traced: collects its updates, and checks the operations after them."""

    def __init__(self, graph: Any, known: Sequence[_PostedUpdate]) -> None:
        self.updates: list[_PostedUpdate] = []
        self._graph = graph
        self._known = known
        self._traced: list[int] = []  # operations at the time of each post

    def defer(
        self, reduction: Deferring, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        """Posts gradients instead of applying them.

        Raises:
            NotDeferrable: the updates of the step cannot be deferred.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise NotDeferrable("it is applied inside of a condition or a function of its own")
        if any(update.optimizer is optimizer for update in self.updates):
            raise NotDeferrable("it is applied more than once in a step")
        reduction.refuse_to_defer()
        found = [update for update in self._known if update.optimizer is optimizer]
        update = found[0] if found else _PostedUpdate(reduction, optimizer)
        update.post(grads, variables)
        self.updates.append(update)
        self._traced.append(len(self._graph.get_operations()))

    def check_nothing_is_read(self) -> None:
        """Raises NotDeferrable if the step reads variables that its update has changed."""
        operations = self._graph.get_operations()
        captured = {id(outer): inner for outer, inner in self._graph.captures}
        for update, traced in zip(self.updates, self._traced, strict=True):
            handles = [(tensorflow_variable(v).handle, v.name) for v in update.variables()]
            names = {
                id(captured[id(handle)]): name for handle, name in handles if id(handle) in captured
            }
            for op in operations[traced:]:
                for read in op.inputs:
                    if id(read) in names and not op.type.startswith("HvdOrder"):
                        raise NotDeferrable(
                            f"the step goes on with '{names[id(read)]}' after the update"
                        )


_tracing: contextvars.ContextVar[_StepTrace | None] = contextvars.ContextVar("step", default=None)


def deferring_step() -> _StepTrace | None:
    """The step being traced, if its updates may be deferred."""
    return _tracing.get()


def _tensors(*nested: Any) -> list[Any]:
    return [part for part in tf.nest.flatten(nested, expand_composites=True) if tf.is_tensor(part)]


def _made_at_once(next_creator: Callable[..., Any], **arguments: Any) -> Any:
    """Creates a variable outside of the function being traced.

    ``tf.function`` initializes new variables after it has traced the whole function, so variables
    of a trace that ends with NotDeferrable would never be initialized.
    """
    try:
        with tf.init_scope():
            return next_creator(**arguments)
    except (TypeError, ValueError):  # its initial value is a tensor of the function
        return next_creator(**arguments)


def _as_called_here(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step as AutoGraph would call it from here; our own code needs no conversion."""
    autograph = tf.__internal__.autograph
    converted: Callable[..., Any] = autograph.tf_convert(
        step, autograph.control_status_ctx(), convert_by_default=False
    )
    return converted


class OverlappedStep:
    """A training step with deferred updates.

    If its updates cannot be deferred, the step applies them itself and logs this once.
    Thread safety: one thread at a time.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        build: Callable[[Callable[..., Any]], Callable[..., Any]],
        within: Callable[..., Any],
    ) -> None:
        """Creates the step without tracing.

        Args:
            step: applies one or more DistributedOptimizers to gradients.
            build: makes a traced function of such a step, or a function that calls one.
            within: function built from `step` itself, which applies its updates within the step.
        """

        def first(*args: Any, **kwargs: Any) -> Any:
            return self._trace(_as_called_here(step), False, args, kwargs)

        def follower(*args: Any, **kwargs: Any) -> Any:
            return self._trace(_as_called_here(step), True, args, kwargs)

        self._first, self._next = build(first), build(follower)
        self._within = within
        self._apply = tf.function(self._apply_all, autograph=False)
        self._updates: list[_PostedUpdate] = []
        self._refusal = ""
        self._broken = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
            HvdOrderError: an earlier step failed, and the variables have to be restored.
        """
        if any(one is not self for one in deferred_updates.pending):
            deferred_updates.flush()
        if self.is_refused():
            return self._within(*args, **kwargs)
        if self._broken:
            raise HvdOrderError(
                "an earlier step failed when some of its updates had been applied: restore the "
                "variables and make the function again (model.make_train_function(force=True))"
            )
        try:
            return self._run(args, kwargs)
        except Exception:
            if not self.is_refused():
                raise
            # Raised during tracing: nothing of this step has been executed.
            _log.info(
                "updates are applied within each step, not while the next one runs: %s",
                self._refusal,
            )
            self.flush()
            return self._within(*args, **kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        was_pending = self in deferred_updates.pending
        try:
            with deferred_updates.busy():
                if was_pending:
                    return self._next(*args, **kwargs)
                deferred_updates.pending.append(
                    self
                )  # set before: Ctrl-C may come right after the call
                return self._first(*args, **kwargs)
        except (StopIteration, tf.errors.OutOfRangeError):  # no data: nothing was executed
            if not was_pending:
                deferred_updates.pending.remove(self)
            raise
        except Exception:
            if not was_pending:
                deferred_updates.pending.remove(self)
            if not self.is_refused():
                self._give_up()
            raise

    def is_refused(self) -> bool:
        """Whether the updates have to be applied within the step."""
        return bool(self._refusal)

    def flush(self) -> None:
        """Applies the deferred updates.

        Raises:
            HorovodInternalError: a rank is gone or late; the variables have to be restored.
        """
        if self not in deferred_updates.pending:
            return
        deferred_updates.pending.remove(self)
        try:
            with deferred_updates.busy():
                self._apply()
        except Exception as error:
            self._give_up()
            if isinstance(error, tf.errors.OpError):
                raise translated(error) from error
            raise

    def _give_up(self) -> None:
        self._broken = bool(self._updates)
        if self in deferred_updates.pending:
            deferred_updates.pending.remove(self)
        for update in self._updates:
            update.gradients.close()

    def _apply_all(self) -> None:
        for update in self._updates:
            update.apply()

    @tf.autograph.experimental.do_not_convert
    def _trace(self, step: Callable[..., Any], follows: bool, args: Any, kwargs: Any) -> Any:
        try:
            if tf.executing_eagerly():
                raise NotDeferrable("the step is not traced")
            graph = tf.compat.v1.get_default_graph()
            # When the data has ended the step fails, and then nothing may have been executed: no
            # update, and nothing that needs the shape of the data alone, as a metric's count does.
            data = _tensors(args, kwargs)
            if follows:
                with tf.control_dependencies(data):
                    self._apply_all()
            trace = _StepTrace(graph, self._updates)
            token = _tracing.set(trace)
            # Later traces find the variables; TensorFlow rejects new ones in every trace.
            first_one = not (self._updates or tf.distribute.has_strategy())
            try:
                with (
                    tf.control_dependencies(data),
                    tf.variable_creator_scope(_made_at_once) if first_one else nullcontext(),
                ):
                    result = step(*args, **kwargs)
            finally:
                _tracing.reset(token)
            trace.check_nothing_is_read()
            if not trace.updates:
                raise NotDeferrable("the step applies no DistributedOptimizer over several ranks")
            if self._updates and trace.updates != self._updates:
                raise NotDeferrable("the optimizers are not the same in every step")
        except NotDeferrable as reason:
            self._refusal = str(reason)
            raise
        self._updates = trace.updates
        for update in trace.updates:
            deferred_updates.watch(update.variables())
        return result


def overlapped_function(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``tf.function`` for a training step that applies DistributedOptimizers of Keras.

    The next call applies the updates at its beginning, while gradients of other variables still
    travel. An eager read of a variable before waits for them. A traced function of your own that
    reads variables needs a `flush` before it.

    Args:
        step: takes a batch; calls ``optimizer.apply`` (or ``apply_gradients``).
        options: of ``tf.function``; ``jit_compile`` is not possible.

    Raises:
        ValueError: jit_compile is given.
    """
    if options.get("jit_compile"):
        raise ValueError("XLA has no operators that communicate: leave jit_compile out")

    def build(one: Callable[..., Any]) -> Callable[..., Any]:
        return tf.function(one, **options)  # type: ignore[no-any-return]

    overlap = started_backend().config().cross_iteration
    return OverlappedStep(step, build, build(step)) if overlap else build(step)
