"""Matches the ranks' collectives without a name.

In eager mode collectives run in program order, so call order matches them. TensorFlow may run a
graph in any order. Only operators that use the same resource, in a function that ``tf.function``
has traced, follow program order, also in nested functions, conditions and loops. So all collectives
of such a function take the handle of one resource, and share the name of the function. Other graphs
(``tf.compat.v1`` sessions, ``wrap_function``, derivatives of nested functions) have no order: there
a collective is named after the operator, which is named after the tensor, as in Horovod.
Collectives that neither distinguishes are rejected.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import structured_function
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow

from hvd_order.base.errors import InvalidUsage
from hvd_order.tensorflow.backend.failures import as_both
from hvd_order.tensorflow.backend.interface import Collective
from hvd_order.tensorflow.ops.requests import collective_of

__all__ = ["CollectivePlace", "eager_turn", "in_graph", "refuse_in_data_functions"]

_LOOPS = (control_flow.WhileBodyFuncGraph, control_flow.WhileCondFuncGraph)
_UID = re.compile(r"(?:_\d+)+$")  # of a process: no two have the same
_OTHER = re.compile(r"[^A-Za-z0-9_.\-/]")


@dataclass(frozen=True)
class CollectivePlace:
    """A collective as an operator of a graph.

    Attributes:
        collective: the collective, with the name that matches the ranks' calls.
        operator: name of the operator.
        order: handles that keep the operator in program order.
    """

    collective: Collective
    operator: str
    order: Sequence[Any] = ()


def in_graph(collective: Collective, tensors: Sequence[Any]) -> CollectivePlace:
    """Place of a collective in the graph being built.

    Raises:
        InvalidUsage: it has no name, and is in a loop whose iterations run in any order.
    """
    graph = tf.compat.v1.get_default_graph()
    operator = f"hvd_{collective.kind}_{_name_of(tensors)}"
    if collective.name is not None:
        return CollectivePlace(collective, operator)
    around = list(_control_flow_around(graph))
    function = around[-1].outer_graph if around else graph
    if tf.compat.v1.executing_eagerly_outside_functions() and all(
        _keeps_order(one) for one in (*around, function)
    ):
        named = replace(collective, name=f"noname.{_without_uid(function.name)}")
        return CollectivePlace(named, operator, [_turn(collective.process_set)])
    _refuse_loops(collective, operator, around, graph)
    unique = graph.unique_name(operator)
    path = [_without_uid(one.name) for one in (function, *reversed(around)) if hasattr(one, "name")]
    return CollectivePlace(replace(collective, name="/".join([*path, unique])), f"{unique}/")


def _name_of(tensors: Sequence[Any]) -> str:
    """Name of the first tensor in characters valid for operators; eager tensors have none."""
    if not tensors or isinstance(tensors[0], tf.__internal__.EagerTensor):
        return "constant"
    return _OTHER.sub("_", tensors[0].name)


def _control_flow_around(graph: Any) -> Iterator[Any]:
    """Branches and loops around the graph being built, the innermost first."""
    while isinstance(graph, control_flow.ControlFlowFuncGraph):
        yield graph
        graph = graph.outer_graph


def _keeps_order(graph: Any) -> bool:
    """Whether operators of the graph that use one resource run in program order."""
    return graph.experimental_acd_manager is not None


def _without_uid(name: str) -> str:
    return _UID.sub("", name)


def _refuse_loops(collective: Collective, operator: str, around: Sequence[Any], graph: Any) -> None:
    context = graph._get_control_flow_context()
    while context is not None and not context.IsWhileContext():
        context = context.outer_context
    if context is not None or any(
        isinstance(one, _LOOPS) and not _keeps_order(one) for one in around
    ):
        raise as_both(
            InvalidUsage,
            f"hvd.{collective.kind}() without a name ('{operator}') in a loop of a graph that "
            "does not keep the program's order: its iterations may run in another order on each "
            "rank. Put the loop into a tf.function, or give the call a name and the loop "
            "parallel_iterations=1",
        )


@functools.cache
def _turn(process_set: int) -> Any:
    """A handle that orders the collectives of a process set. It has no value."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=[], shared_name=f"hvd_order turn {process_set}"
        )


_eager: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # by process set


@contextlib.contextmanager
def eager_turn(collective: Collective) -> Iterator[None]:
    """Context of an eager collective.

    Raises:
        InvalidUsage: neither it nor a running collective of another thread has a name.
    """
    if collective.name is not None:
        yield
        return
    turn = _eager[collective.process_set]
    if not turn.acquire(blocking=False):
        raise as_both(
            InvalidUsage,
            f"hvd.{collective.kind}() without a name while another thread is in such a call: "
            "which of them comes first may differ between ranks; give them names",
        )
    try:
        yield
    finally:
        turn.release()


def refuse_in_data_functions() -> None:
    """Makes ``tf.data`` reject functions that communicate; a second call does nothing.

    ``tf.data`` runs a function for several elements at a time and ahead of their use, in a
    different order on each rank. Neither the function nor an operator can identify the element.
    """
    wrapper = structured_function.StructuredFunctionWrapper
    if not hasattr(wrapper.__init__, "_hvd_checks"):
        wrapper.__init__ = _checking(wrapper.__init__)


def _checking(own_init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own_init)
    def init(self: Any, func: Any, transformation_name: str, *args: Any, **kwargs: Any) -> None:
        own_init(self, func, transformation_name, *args, **kwargs)
        graph = getattr(self.function, "graph", None)  # TensorFlow 1's functions have none
        call = None if graph is None else _communication(graph)
        if call is not None:
            raise as_both(
                InvalidUsage,
                f"{transformation_name} runs {call}: tf.data decides how far ahead, and in which "
                "order, it runs a function for the elements, and that differs between ranks. "
                "Call it on the elements, in the training step or in the loop over the dataset",
            )

    init._hvd_checks = True  # type: ignore[attr-defined]
    return init


def _communication(graph: Any) -> str | None:
    """Finds an operator of hvd_order in a graph, or in a function that it calls."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    for node in nodes:
        if node.op == "HvdOrderCollective":
            return f"hvd.{collective_of(node.attr['description'].i).kind}() ('{node.name}')"
        if node.op.startswith("HvdOrder"):
            return f"the exchange of gradients ('{node.name}')"
    return None
