"""What calls into the driver cost the host, from one thread and from two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.engine.gpu.finding import Finding
from benchmarks.runner.ranks import finish

_CALLS = 500  # fewer than a queue of launches holds


def check_driver(device: torch.device) -> Finding:
    """Microseconds of a launch and of an event's creation, record, wait and query.

    With two threads both are Python's, and so wait for its lock too.
    """
    figures = {}
    for threads in (1, 2):
        for name in _calls(device):
            figures[f"{name}_{threads}_threads_s"] = _seconds(name, device, threads)
    text = ", ".join(
        f"{name} {1e6 * figures[f'{name}_1_threads_s']:.1f}"
        f" ({1e6 * figures[f'{name}_2_threads_s']:.1f})"
        for name in _calls(device)
    )
    return Finding(f"us from one thread (from each of two): {text}", figures)


def _calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """Calls by name, with a stream and an event of their own; launches go to the current stream."""
    stream = torch.Stream(device)
    x = torch.zeros(1, device=device)
    event = torch.Event(device)
    event.record(stream)

    def create() -> None:  # the driver makes an event when it is recorded first
        torch.Event(device).record(stream)

    return {
        "launch": lambda: x.zero_(),
        "create": create,
        "record": lambda: event.record(stream),
        "wait": lambda: stream.wait_event(event),
        "query": event.query,
    }


def _seconds(name: str, device: torch.device, threads: int) -> float:
    """Seconds of one call, of the slower thread."""
    together = threading.Barrier(threads)

    def measure(_: int) -> float:
        call = _calls(device)[name]
        for _ in range(10):
            call()
        finish(device)
        together.wait(timeout=30)
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        return (time.perf_counter() - begin) / _CALLS

    with ThreadPoolExecutor(threads) as pool:
        return max(pool.map(measure, range(threads)))
