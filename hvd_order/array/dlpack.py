"""Converts arrays to tensors and back through DLPack, in the same memory where possible.

This module imports no array library. It uses numpy itself for the caller's numpy arrays, because
DLPack cannot describe all of them; for other libraries it uses the protocol alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from hvd_order.array.capsule import exported
from hvd_order.errors import InvalidUsage

__all__ = ["Array", "FromTensor", "back_to", "settle", "to_tensor", "to_writable_tensor"]


class Array(Protocol):
    """An object with the DLPack protocol: numpy.ndarray, cupy.ndarray, jax.Array, torch.Tensor,
    ...
    """

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


FromTensor = Callable[[torch.Tensor], Any]


def to_tensor(array: Any) -> torch.Tensor:
    """A read-only tensor with the array's values, in the same memory where possible.

    Numpy arrays that PyTorch cannot represent (negative strides, foreign byte order, fields of
    records) are copied, and so are numpy's scalars.

    Raises:
        InvalidUsage: the argument is not an array, or cannot be exchanged.
    """
    _check_kind(array)
    numpy = _numpy_of(array)
    if numpy is not None and isinstance(array, numpy.generic):
        array = numpy.asarray(array)
    try:
        if not exported(array).negative_strides:
            return _as_tensor(array)
    except BufferError as error:
        if numpy is None:
            raise _refused(array, error) from error
    if numpy is None:
        raise _refused(array, "it has negative strides; pass a contiguous copy")
    native = numpy.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    try:
        return _as_tensor(native)
    except BufferError as error:  # not numbers
        raise _refused(array, error) from error


def to_writable_tensor(array: Any) -> torch.Tensor:
    """A tensor in the array's own memory.

    Raises:
        InvalidUsage: the argument is not an array, or cannot be written through a tensor.
    """
    _check_kind(array)
    if not hasattr(array, "__dlpack__"):
        raise _refused(array, "it is a number, not an array", in_place=True)
    try:
        found = exported(array)
    except BufferError as error:
        raise _refused(array, error, in_place=True) from error
    if not found.shared:
        raise _refused(array, "it is read-only", in_place=True)
    if found.negative_strides:
        raise _refused(array, "it has negative strides", in_place=True)
    return _as_tensor(array)


def back_to(array: Any) -> FromTensor:
    """A function that makes arrays of the library of `array`, and for numpy of its byte order.

    Raises:
        InvalidUsage: the library has no ``from_dlpack``.
    """
    numpy = _numpy_of(array)
    if numpy is not None:
        # numpy.from_dlpack gives read-only arrays if an older PyTorch exports DLPack 0.x.
        if array.dtype.isnative:
            return lambda tensor: tensor.numpy()
        return lambda tensor: _in_byte_order(tensor.numpy(), array.dtype.byteorder)
    namespace = getattr(array, "__array_namespace__", None)
    if namespace is not None:
        standard: FromTensor | None = getattr(namespace(), "from_dlpack", None)
        if standard is not None:
            return standard
    path = type(array).__module__
    while path:
        own: FromTensor | None = getattr(sys.modules.get(path), "from_dlpack", None)
        if own is not None:
            return own
        path = path.rpartition(".")[0]
    raise InvalidUsage(
        f"no from_dlpack in the module of {_type_name(array)} or above it, which would make the "
        "result such an array"
    )


def settle(tensor: torch.Tensor) -> None:
    """Waits until the device has finished all work queued so far on `tensor`.

    DLPack orders a consumer's stream after the producer's, but never the producer's after the
    consumer's. A library with a stream of its own could otherwise overwrite memory that is still
    being read, or read memory that is still being written.
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _in_byte_order(array: Any, order: str) -> Any:
    return array.astype(array.dtype.newbyteorder(order))


def _check_kind(array: Any) -> None:
    numpy = _numpy_of(array)
    if numpy is not None and isinstance(array, numpy.ma.MaskedArray):
        raise _refused(array, "its mask would be lost; send array.filled() or data and mask")
    if numpy is not None and isinstance(array, numpy.generic):
        return
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        raise InvalidUsage(
            f"expected an array that speaks DLPack (numpy, cupy, ...), got {_type_name(array)}; "
            "write numpy.asarray(...) around numbers and lists"
        )


def _numpy_of(array: Any) -> Any:
    """The numpy module if `array` is a numpy object, else None."""
    numpy = sys.modules.get("numpy")
    known = numpy is not None and isinstance(array, (numpy.ndarray, numpy.generic))
    return numpy if known else None


def _as_tensor(array: Any) -> torch.Tensor:
    tensor: torch.Tensor = from_dlpack(array)
    return tensor


def _refused(array: Any, why: object, in_place: bool = False) -> InvalidUsage:
    cure = "; use the function without the final underscore" if in_place else ""
    how = "written in place" if in_place else "exchanged"
    return InvalidUsage(f"this {_type_name(array)} cannot be {how}: {why}{cure}")


def _type_name(array: Any) -> str:
    kind = type(array)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
