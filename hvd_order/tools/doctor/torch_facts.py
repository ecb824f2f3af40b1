"""Facts about PyTorch and the native modules; run as a program, prints one JSON object.

Runs in a separate process, since a broken build can crash when it is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import sys
from typing import Any

__all__: list[str] = []


def _native(name: str, checked_by: str | None = None) -> dict[str, Any]:
    """Whether a native module can be loaded, and from where.

    Args:
        checked_by: module to import first, whose errors say more.
    """
    try:
        if checked_by:
            importlib.import_module(checked_by)
        module = importlib.import_module(name)
    except ImportError as error:
        return {"works": False, "why": str(error).strip().split("\n")[0]}
    return {"works": True, "file": getattr(module, "__file__", None)}


def _torch() -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # whatever a broken build raises
        return {"works": False, "why": str(error).strip().split("\n")[0]}
    if not dist.is_available():
        return {
            "works": False,
            "why": "built without torch.distributed",
            "version": torch.__version__,
        }
    nccl = dist.is_nccl_available()
    return {
        "works": True,
        "version": torch.__version__,
        "cxx11_abi": bool(torch._C._GLIBCXX_USE_CXX11_ABI),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "devices": [torch.cuda.get_device_name(d) for d in range(torch.cuda.device_count())],
        "gloo": dist.is_gloo_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else False,
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }


def _driver() -> int | None:
    """The newest CUDA that the NVIDIA driver supports: 12040 is 12.4; None: there is none."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value or None


def _kernels() -> dict[str, Any]:
    """Whether hvd_order's kernels for CUDA run."""
    try:
        kernels = importlib.import_module("hvd_order.torch.kernels").kernels_for("cuda")
    except Exception as error:  # whatever a broken build raises
        return {"compiled_for": "", "why_not": str(error).strip().split("\n")[0]}
    return {"compiled_for": kernels.compiled_for, "why_not": kernels.why_not}


def _horovod() -> dict[str, Any]:
    """What the installed Horovod was built with."""
    try:
        horovod = importlib.import_module("horovod.torch")
        version = importlib.import_module("horovod").__version__
        names = ("gloo", "mpi", "nccl", "ccl", "cuda", "rocm")
        built = [name for name in names if getattr(horovod, f"{name}_built")()]
    except Exception as error:  # a Horovod that was built for another PyTorch
        return {"works": False, "why": str(error).strip().split("\n")[0]}
    return {"works": True, "version": version, "built_with": built}


def main() -> None:
    """Prints the facts; ``horovod`` as argument asks for Horovod alone."""
    if sys.argv[1:] == ["horovod"]:
        facts: dict[str, Any] = _horovod()
    else:
        facts = {"torch": _torch(), "core": _native("hvd_order._native._core")}
        facts["extension"] = _native("hvd_order._native._torch", "hvd_order.engine")
        facts["devices"] = {"driver": _driver(), "kernels": _kernels()}
    sys.stdout.write("\n" + json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
