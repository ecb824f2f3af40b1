"""Times a step that is not recorded: what a profile's times have to add up to."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from hvd_order.planning.profiling.recording import Clock

__all__ = ["PlainStep"]


class PlainStep:
    """Times one step while it is entered, from the first call of the model on.

    What comes before, such as loading data, is time between two steps. The only thing that a step
    notices is a hook that the first call of a module with parameters removes.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        clock: Clock = time.perf_counter,
    ) -> None:
        self._ids = {id(p) for _, p in parameters}
        self._clock = clock
        devices = {p.device for _, p in parameters} - {torch.device("cpu")}
        self._device = min(devices, key=str, default=None)
        self._times: list[float | torch.Event] = []
        self._begin: float | torch.Event | None = None

    def __enter__(self) -> PlainStep:
        self._hook = register_module_forward_pre_hook(self._called)
        self._times = [self._now()]
        return self

    def __exit__(self, *_: object) -> None:
        self._times.append(self._now())
        self._hook.remove()

    @property
    def step_s(self) -> float:
        """Time of the whole step; waits for the device."""
        return _between(*self._times)

    @property
    def before_s(self) -> float | None:
        """Time before the model's first call; None if no module with parameters was called."""
        return None if self._begin is None else _between(self._times[0], self._begin)

    def _called(self, module: torch.nn.Module, _: object) -> None:
        if self._begin is None and any(id(p) in self._ids for p in module.parameters()):
            self._begin = self._now()
            self._hook.remove()

    def _now(self) -> float | torch.Event:
        """The time, or an event where the device's time counts."""
        if self._device is None:
            return self._clock()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def _between(begin: float | torch.Event, end: float | torch.Event) -> float:
    if isinstance(begin, torch.Event) and isinstance(end, torch.Event):
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return end - begin
