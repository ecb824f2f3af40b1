"""Arrays over memory, and how MPI adds up those whose dtypes it does not know."""

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
    """Memory as a flat array; valid as long as somebody keeps the memory."""
    if size_bytes == 0:
        return np.zeros(0, dtype)
    memory = memoryview((ctypes.c_uint8 * size_bytes).from_address(address))
    return np.frombuffer(memory, np.uint8).view(dtype)


def array_of(tensor: HostTensor) -> Any:
    """The same memory as an array."""
    dtype = dtype_of(tensor.dtype)
    flat = view(tensor.address, math.prod(tensor.shape) * dtype.itemsize, dtype)
    return flat.reshape(tensor.shape)


def compact(array: Any) -> Any:
    """The array in one piece of memory; unlike numpy's, it keeps one without dimensions so."""
    return np.ascontiguousarray(array).reshape(array.shape)


def host_tensor_of(array: Any) -> HostTensor:
    """The same memory, kept by what is returned."""
    array = compact(array)
    return HostTensor(array.dtype.name, tuple(array.shape), array.ctypes.data, array)


def sendable(array: Any) -> Any:
    """What mpi4py takes as a buffer of this array's elements."""
    if array.dtype in (np.dtype(np.float16), dtype_of("bfloat16")):
        return [array.view(np.uint16), _two_bytes()]
    return array


def summing(dtype: np.dtype[Any]) -> MPI.Op:
    """MPI's sum, or one of our own for 16-bit floats, which it does not know."""
    if dtype in (np.dtype(np.float16), dtype_of("bfloat16")):
        return _sum_of(dtype.name)
    return MPI.SUM


@functools.cache
def _two_bytes() -> MPI.Datatype:
    """An element of two bytes that MPI neither reads nor cuts."""
    return MPI.BYTE.Create_contiguous(2).Commit()


@functools.cache
def _sum_of(name: str) -> MPI.Op:
    dtype = dtype_of(name)

    def add(one: Any, into: Any, _: MPI.Datatype) -> None:
        total = np.frombuffer(into, np.uint8).view(dtype)
        total += np.frombuffer(one, np.uint8).view(dtype)

    return MPI.Op.Create(add, commute=True)
