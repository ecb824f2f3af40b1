"""The library of operators: finds, tests and loads it, and declares its C functions.

There are two builds. `_tensorflow_ops` needs no headers and works with every TensorFlow whose C
interface has a property that TensorFlow does not guarantee (csrc/tensorflow/c_api.cc). So before
the first use with a version of TensorFlow, a separate process tests it, and the result is cached.
`_tensorflow_ops_cpp` works only with the version that it was built with.
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
        InvalidUsage: no build of it works with this TensorFlow; the message says what to do.
    """
    with _loaded.lock:
        if _loaded.library is None:
            _loaded.library = OpLibrary(_choose())
        return _loaded.library


def open_library(path: Path) -> OpLibrary:
    """Loads `path` as the library of this process without a test: for the self-test."""
    with _loaded.lock:
        _loaded.library = OpLibrary(path)
        return _loaded.library


def _choose() -> Path:
    folder = Path(__file__).resolve().parents[2] / "_native"
    suffix = get_config_var("EXT_SUFFIX")
    portable = folder / f"_tensorflow_ops{suffix}"
    by_headers = folder / f"_tensorflow_ops_cpp{suffix}"
    cure = (
        "build hvd_order where this TensorFlow is installed, with: pip install "
        "--no-build-isolation . (in a checkout: make build)"
    )
    if not portable.exists() and not by_headers.exists():
        raise InvalidUsage(f"the operators for TensorFlow were not built; {cure}")
    why = "it was not built"
    if portable.exists():
        why = _verdict(portable)
        if not why:
            return portable
    if by_headers.exists() and _built_for(by_headers) == tf.__version__:
        return by_headers
    raise InvalidUsage(
        f"the operators do not work with TensorFlow {tf.__version__} through its C interface "
        f"({why}), and were not built with its headers; {cure}"
    )


def _built_for(library: Path) -> str:
    """The TensorFlow version that a library was built with, read without loading it."""
    marker = b"hvd_order was built with TensorFlow "
    content = library.read_bytes()
    start = content.find(marker)
    end = content.find(b"\0", start)
    return content[start + len(marker) : end].decode() if start >= 0 else "unknown"


def _verdict(library: Path) -> str:
    """Reason why the library does not work here; empty if it works. Cached on disk."""
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
