"""Reads the flags and layout in a DLPack capsule, which torch.from_dlpack does not check.

PyTorch 2.13 writes into arrays that were exported as read-only or as a copy, and ends the process
on negative strides. The layout is that of dlpack.h, versions 0.x (``dltensor``) and 1.x
(``dltensor_versioned``).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

__all__ = ["HAVE_STREAMS", "Exported", "exported"]

# Types of devices for which DLPack defines the argument `stream`: CUDA, ROCm, managed memory.
HAVE_STREAMS = (2, 10, 13)

_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_COPIED = 2  # DLPACK_FLAG_BITMASK_IS_COPIED


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


# Separate function objects, because the whole process shares those of ctypes.pythonapi.
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)


@dataclass(frozen=True)
class Exported:
    """What a library would export for an array.

    Attributes:
        negative_strides: some dimension runs backwards through memory.
        shared: writes to the export reach the array. Exporters before DLPack 1.0 cannot tell; the
            standard forbids them to export read-only memory.
    """

    negative_strides: bool
    shared: bool


def exported(array: Any) -> Exported:
    """Requests a capsule from an array's library, reads it and leaves it unused.

    Nobody reads the array's values here, so no stream is made to wait for them.

    Raises:
        BufferError: the library cannot export this array.
    """
    # Without a stream the library would order CUDA's legacy default stream behind its own.
    options = {"stream": -1} if array.__dlpack_device__()[0] in HAVE_STREAMS else {}
    try:
        capsule = array.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # an exporter of DLPack 0.x
        capsule = array.__dlpack__(**options)
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        tensor, shared = versioned.tensor, not versioned.flags & (_READ_ONLY | _COPIED)
    else:
        # A capsule of version 0.x begins with the tensor.
        tensor, shared = _DLTensor.from_address(_get_pointer(capsule, b"dltensor")), True
    # Without strides the memory is contiguous; dlpack.h allows that up to version 1.1.
    strides = tensor.strides[: tensor.ndim] if tensor.strides else []
    return Exported(any(stride < 0 for stride in strides), shared)
