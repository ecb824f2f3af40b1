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

from hvd_order.array.capsule import HAVE_STREAMS, exported
from hvd_order.base.errors import InvalidUsage

__all__ = [
    "Array",
    "FromTensor",
    "back_to",
    "hand_to",
    "order_behind",
    "to_tensor",
    "to_writable_tensor",
]


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


class Handed:
    """A tensor on its way to another library, which sees whether the library names its stream.

    Attributes:
        ordered: the library's stream waits for what the current stream has been given to do.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """The tensor's device has streams, or the tensor is on the CPU."""
        self._tensor = tensor
        self.ordered = False

    def __dlpack_device__(self) -> tuple[Any, int]:
        """As the tensor's."""
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """As the tensor's. PyTorch 2.13 does not wait if no stream is given; DLPack says that this
        is the legacy default stream.
        """
        if self._tensor.__dlpack_device__()[0] not in HAVE_STREAMS:
            return self._tensor.__dlpack__(**options)
        self.ordered = stream != -1
        with torch.cuda.device(self._tensor.device):
            return self._tensor.__dlpack__(stream=stream, **options)


def hand_to(library: FromTensor, tensor: torch.Tensor) -> Any:
    """An array of a library with the memory of a tensor, behind the current stream's work.

    The host waits only if the library does not name its stream.
    """
    if tensor.device.type == "cpu":
        return library(tensor)
    handed: Any = Handed(tensor)
    array = library(handed)
    if not handed.ordered:
        _finish(tensor.device)
    return array


def order_behind(array: Any, tensor: torch.Tensor) -> None:
    """Orders the stream of an array's library behind the work on the array's memory, `tensor`.

    DLPack orders a consumer's stream behind the producer's, but never the producer's behind the
    consumer's. The library could otherwise overwrite memory that is still being read, or read
    memory that is still being written. So it is made a consumer as well.
    """
    if tensor.device.type == "cpu":
        return
    try:
        library = back_to(array)
    except InvalidUsage:
        _finish(tensor.device)
    else:
        hand_to(library, tensor)


def _finish(device: torch.device) -> None:
    """Waits on the host for all work of the current stream."""
    torch.get_device_module(device).current_stream(device).synchronize()


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
