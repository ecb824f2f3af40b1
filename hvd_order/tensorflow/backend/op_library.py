"""The library of operators: finds, tests and loads it, and declares its C functions.

`_tensorflow_ops` needs no headers and works with every TensorFlow whose C interface has a property
that TensorFlow does not guarantee (csrc/tensorflow/c_api.cc). So before the first use with a
version of TensorFlow, a separate process tests it, and the result is cached.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from sysconfig import get_config_var
from typing import Any

import tensorflow as tf

from hvd_order.base.errors import InvalidUsage

__all__ = ["NativeTensor", "OpLibrary", "load", "open_library"]

_SUFFIX = get_config_var("EXT_SUFFIX")
_TRIED = "2.21"  # version of TensorFlow, as in docs/guides/tensorflow.md
_SELF_TEST_S = 120.0  # a cold import of TensorFlow takes most of it


class NativeTensor(ctypes.Structure):
    """A tensor in the library's C interface; dtypes are TensorFlow's numbers."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
        ("size_bytes", ctypes.c_uint64),
    )


class OpLibrary:
    """The loaded library.

    Attributes:
        ops: TensorFlow's Python wrappers of the operators.
        native: its C functions (csrc/tensorflow/library.cc).
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        """Loads the library.

        Raises:
            InvalidUsage: TensorFlow rejects the library.
        """
        self.path = path
        try:
            self.ops: Any = tf.load_op_library(str(path))
        except (tf.errors.OpError, OSError) as error:
            raise InvalidUsage(
                f"TensorFlow {tf.__version__} cannot load {path}: {error}"
            ) from error
        if not hasattr(self.ops, "hvd_order_collective"):
            raise InvalidUsage(
                f"TensorFlow {tf.__version__} does not have what the operators in {path} need; "
                "what it lacks is printed above"
            )
        self.native = ctypes.CDLL(str(path))  # releases the GIL during calls
        call, text = ctypes.c_void_p, ctypes.c_char_p
        tensors = ctypes.POINTER(NativeTensor)
        for name, result, arguments in (
            ("hvdo_set_engine_api", ctypes.c_int, [ctypes.c_void_p]),
            ("hvdo_open_collectives", None, []),
            ("hvdo_close_collectives", None, []),
            ("hvdo_next_call", call, []),
            ("hvdo_call_description", ctypes.c_int64, [call]),
            ("hvdo_call_inputs", ctypes.c_int, [call]),
            ("hvdo_call_input", None, [call, ctypes.c_int, tensors]),
            ("hvdo_end_call", None, [call, ctypes.c_int, tensors]),
            ("hvdo_fail_call", None, [call, ctypes.c_int, text]),
        ):
            function = getattr(self.native, name)
            function.restype, function.argtypes = result, arguments

    def set_engine_api(self, address: int) -> None:
        """Passes the address of the engine's function table to the gradient operators.

        Raises:
            InvalidUsage: the library and the engine are of different builds.
        """
        if not self.native.hvdo_set_engine_api(address):
            raise InvalidUsage(
                f"{self.path} and the engine are of different builds of hvd_order; build it again "
                "with: pip install --no-build-isolation . (in a checkout: make build)"
            )


class _Loaded:
    """The library of this process: TensorFlow loads one once and never unloads it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards `library`
        self.library: OpLibrary | None = None


_loaded = _Loaded()


def load() -> OpLibrary:
    """Returns the library; the first call loads it.

    Raises:
        InvalidUsage: it was not built, or does not work with this TensorFlow.
    """
    with _loaded.lock:
        if _loaded.library is None:
            _loaded.library = OpLibrary(_tested())
        return _loaded.library


def open_library(path: Path) -> OpLibrary:
    """Loads `path` as the library of this process without a test: for the self-test."""
    with _loaded.lock:
        _loaded.library = OpLibrary(path)
        return _loaded.library


def _tested() -> Path:
    library = Path(__file__).resolve().parents[2] / "_native" / f"_tensorflow_ops{_SUFFIX}"
    if not library.exists():
        raise InvalidUsage(
            "the operators for TensorFlow were not built; build hvd_order with: pip install . (in "
            "a checkout: make build)"
        )
    if why := _verdict(library):
        raise InvalidUsage(
            f"the operators do not work with TensorFlow {tf.__version__} ({why}); install a "
            f"version that hvd_order was tried with, such as {_TRIED}"
        )
    return library


def _verdict(library: Path) -> str:
    """Why the library does not work here; empty if it does. Cached on disk."""
    digest = hashlib.blake2b(library.read_bytes(), digest_size=8).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_order"
    record = cache / f"tensorflow-{tf.__version__}-{digest}"
    with contextlib.suppress(OSError):
        return record.read_text("utf-8")
    verdict = _self_test(library)
    with contextlib.suppress(OSError):  # without a cache, every process tests
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache, delete=False, encoding="utf-8") as file:
            file.write(verdict)
        Path(file.name).replace(record)
    return verdict


def _self_test(library: Path) -> str:
    command = [sys.executable, "-m", "hvd_order.tensorflow.backend.self_test", str(library)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SELF_TEST_S
        )
    except subprocess.TimeoutExpired:
        return f"its self-test took more than {_SELF_TEST_S:g} s"
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip() or "it printed nothing").split("\n")[-1]
    return f"its self-test ended with code {done.returncode}: {last}"
