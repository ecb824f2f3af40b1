"""Arrays over memory, and sums of dtypes that MPI does not support."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import ml_dtypes  # TensorFlow needs it as well
import numpy as np
from mpi4py import MPI

from hvd_order.tensorflow.backend.interface import HostTensor

__all__ = ["array_of", "compact", "dtype_of", "host_tensor_of", "sendable", "summing", "view"]


def dtype_of(name: str) -> np.dtype[Any]:
    """Numpy's dtype, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def view(address: int, size_bytes: int, dtype: np.dtype[Any]) -> Any:
    """Memory as a flat array; valid while the memory is kept."""
    if size_bytes == 0:
        return np.zeros(0, dtype)
    memory = memoryview((ctypes.c_uint8 * size_bytes).from_address(address))
    return np.frombuffer(memory, np.uint8).view(dtype)


def array_of(tensor: HostTensor) -> Any:
    """An array over the tensor's memory."""
    dtype = dtype_of(tensor.dtype)
    flat = view(tensor.address, math.prod(tensor.shape) * dtype.itemsize, dtype)
    return flat.reshape(tensor.shape)


def compact(array: Any) -> Any:
    """Returns a contiguous array; unlike numpy's function, it keeps scalars without dimensions."""
    return np.ascontiguousarray(array).reshape(array.shape)


def host_tensor_of(array: Any) -> HostTensor:
    """A tensor over the array's memory, which it keeps."""
    array = compact(array)
    return HostTensor(array.dtype.name, tuple(array.shape), array.ctypes.data, array)


def sendable(array: Any) -> Any:
    """The array's elements in a form that mpi4py accepts as a buffer."""
    if array.dtype in (np.dtype(np.float16), dtype_of("bfloat16")):
        return [array.view(np.uint16), _two_bytes()]
    return array


def summing(dtype: np.dtype[Any]) -> MPI.Op:
    """MPI's sum, or an own sum for 16-bit floats, which MPI does not support."""
    if dtype in (np.dtype(np.float16), dtype_of("bfloat16")):
        return _sum_of(dtype.name)
    return MPI.SUM


@functools.cache
def _two_bytes() -> MPI.Datatype:
    """An opaque MPI datatype of two bytes."""
    return MPI.BYTE.Create_contiguous(2).Commit()


@functools.cache
def _sum_of(name: str) -> MPI.Op:
    dtype = dtype_of(name)

    def add(one: Any, into: Any, _: MPI.Datatype) -> None:
        total = np.frombuffer(into, np.uint8).view(dtype)
        total += np.frombuffer(one, np.uint8).view(dtype)

    return MPI.Op.Create(add, commute=True)
