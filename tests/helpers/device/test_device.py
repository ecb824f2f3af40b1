"""Loads the test device (tests/device) into this process, once."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = "asyncdev"
_MODULE = "hvd_test_device"
_SOURCES = Path(__file__).resolve().parents[2] / "device"
_CSRC = Path(__file__).resolve().parents[3] / "csrc"
_BUILD = Path(__file__).resolve().parents[3] / "build" / "test_device"


@functools.cache
def load() -> Any:
    """Builds the device if need be (half a minute), and registers it.

    Returns:
        The extension: ``set_delays``, ``seed``, ``busy``, ``fail``, ``AsyncBackend``.
    """
    from torch.utils import cpp_extension

    kernels = [_CSRC / "torch/cuda" / name for name in ("host_codes.cc", "host_kernels.cc")]
    files = [*sorted(_SOURCES.glob("*.cc")), *kernels]
    headers = [
        *_SOURCES.glob("*.h"),
        *(_CSRC / "torch/cuda").glob("*.h"),
        *(_CSRC / "base").glob("*.h"),
    ]
    content = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for path in [*files, *sorted(headers)]:
        content.update(path.read_bytes())
    folder = _BUILD / content.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    torch.utils.rename_privateuse1_backend(NAME)
    built = folder / "built"
    with (folder / "builder").open("w") as builder:
        # Ranks start at once. A lock of the kernel ends with its owner; PyTorch's would stay.
        fcntl.flock(builder, fcntl.LOCK_EX)
        if built.exists():
            sys.path.insert(0, str(folder))
            extension: Any = importlib.import_module(_MODULE)
            sys.path.remove(str(folder))
        else:
            (folder / "lock").unlink(missing_ok=True)
            extension = cpp_extension.load(
                _MODULE,
                [str(path) for path in files],
                extra_cflags=["-std=c++20", "-O1", "-ffp-contract=off"],
                extra_include_paths=[str(_CSRC)],
                build_directory=str(folder),
            )
            built.touch()
    torch._register_device_module(NAME, _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(NAME, _backend, devices=NAME)
    return extension


def _backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
    _groups.append(load().AsyncBackend(rank, size, gloo))
    return _groups[-1]


_groups: list[Any] = []


def groups() -> list[Any]:
    """The device's process groups, in the order in which they were made."""
    return _groups


def gradient_group() -> Any:
    """The group that has summed most often."""
    return max(_groups, key=lambda group: group.all_reduces)


def _module(extension: Any) -> types.ModuleType:
    """``torch.<device>``, as far as torch and the tests use it."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    device = torch.device(NAME, 0)
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: extension.synchronize()
    module.current_stream = lambda device_=None: torch.accelerator.current_stream(device)
    module.Stream = lambda device_=None: torch.Stream(device=device)
    module.Event = lambda: torch.Event(device)
    module.stream = lambda stream: stream  # a torch.Stream is its own context
    module.device = lambda device: contextlib.nullcontext()
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # the CPU's generator
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module  # type: ignore[no-any-return]
