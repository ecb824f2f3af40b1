"""Runs deferred updates as if in ``step()``, whatever the context of the reader.

A reader may be inside of a trace, a transform, a dispatch mode, autocast, inference mode or
saved-tensor hooks. These must not see the update, nor affect it. torch keeps them in the thread's
state, so the update runs in the state of a fresh thread (`CleanRoom`). The few global settings
that affect operators are restored to their values at ``step()``.

A ``step()`` that is itself called inside of such a context is meant to be seen by it, and updates
at once: :func:`inside_of` detects this case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch.utils._device import DeviceContext

from hvd_order._native import _torch as native
from hvd_order.torch.parameters import graph_capture

__all__: list[str] = []


def inside_of(device_types: Iterable[str]) -> str | None:
    """The context of the caller that affects operators; None if there is none.

    Args:
        device_types: of the tensors that operators are about to change.
    """
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a dispatch mode"
    if graph_capture.has_compiled_caller():
        return "a compiled function"
    if any(not isinstance(mode, DeviceContext) for mode in _function_modes()):
        return "a torch function mode"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a functorch transform"
    if torch.is_inference_mode_enabled():
        return "inference mode"
    if any(map(torch.is_autocast_enabled, device_types)):
        return "autocast"
    return None


def _function_modes() -> list[object]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(i) for i in range(count)]


class Conditions:
    """Settings of operators outside of the thread's state, and the default device."""

    def __init__(self) -> None:
        """Records the current settings."""
        self._dtype = torch.get_default_dtype()
        self._deterministic = _deterministic()
        self._devices = [mode for mode in _function_modes() if isinstance(mode, DeviceContext)]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A clean room with the recorded settings."""
        with native.CleanRoom(), contextlib.ExitStack() as undo:
            if self._devices:
                undo.enter_context(DeviceContext(self._devices[-1].device))
            if (dtype := torch.get_default_dtype()) != self._dtype:
                undo.callback(torch.set_default_dtype, dtype)
                torch.set_default_dtype(self._dtype)
            if (now := _deterministic()) != self._deterministic:
                undo.callback(_set_deterministic, now)
                _set_deterministic(self._deterministic)
            # For other threads, the parameters are still pending (deferred_updates.py).
            undo.enter_context(torch._C.DisableTorchFunctionSubclass())
            yield


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    enabled, warn_only = mode
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
