"""Translation of errors through TensorFlow, which supports only its own classes.

A failed operator raises one of TensorFlow's errors, whose text begins with ours. In eager mode the
error raised belongs to both classes: ours, and the one that Horovod's operators raise.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_order.base import errors

__all__ = ["as_both", "code_of", "translated"]

_KINDS: dict[str, type[Exception]] = {
    **{
        name: getattr(errors, name)
        for name in errors.__all__
        if name not in ("CommitLost", "HostsUpdatedInterrupt")
    },
    "NotImplementedError": NotImplementedError,
    "ValueError": ValueError,
}
_PATTERN = re.compile(rf"\b({'|'.join(_KINDS)}): (.*)", re.DOTALL)


def code_of(kind: type[Exception]) -> int:
    """TensorFlow's TF_Code for errors of this class."""
    if issubclass(kind, (errors.ModelMismatch, errors.NotInitialized)):
        return tf.errors.FAILED_PRECONDITION  # type: ignore[no-any-return]
    if issubclass(kind, errors.HorovodInternalError):
        return tf.errors.ABORTED  # type: ignore[no-any-return]
    if issubclass(kind, (ValueError, NotImplementedError)):
        return tf.errors.INVALID_ARGUMENT  # type: ignore[no-any-return]
    return tf.errors.INTERNAL  # type: ignore[no-any-return]


_CLASSES: dict[int, Any] = {
    tf.errors.FAILED_PRECONDITION: tf.errors.FailedPreconditionError,
    tf.errors.ABORTED: tf.errors.AbortedError,
    tf.errors.INVALID_ARGUMENT: tf.errors.InvalidArgumentError,
    tf.errors.INTERNAL: tf.errors.InternalError,
}


def as_both(kind: Any, text: str) -> Exception:
    """An error of both our and TensorFlow's class: programs may catch either."""
    return _both(kind)(text)


@functools.cache
def _both(kind: Any) -> Callable[[str], Exception]:
    code = code_of(kind)
    members: dict[str, Any] = {
        "__init__": Exception.__init__,  # AutoGraph keeps such classes (errors.HvdOrderError)
        "__reduce__": lambda self: (as_both, (kind, self.args[0])),
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "_message": property(lambda self: self.args[0]),
        "_error_code": code,
        "_node_def": None,
        "_op": None,
        "_experimental_payloads": {},
    }
    return type(kind.__name__, (kind, _CLASSES[code]), members)


def translated(error: Exception) -> Exception:
    """Converts an error of our operators; TensorFlow's own errors stay unchanged."""
    found = None if isinstance(error, errors.HvdOrderError) else _PATTERN.search(str(error))
    if found is None:
        return error
    kind, text = found.groups()
    # TensorFlow adds the node of a graph, or the operator in eager mode.
    text = re.sub(r"\s*(\[\[\{\{node |\[Op:\w+\]).*", "", text, flags=re.DOTALL)
    return as_both(_KINDS[kind], text)
