"""The bandwidth of the kernels that pack gradients and unpack sums."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
from helpers.device.opened import require_kernels
from torch import Tensor

from benchmarks.engine.gpu.finding import Finding
from benchmarks.runner.ranks import finish
from hvd_order._native import _torch as native

_MIB = 2**20
_CACHE_BYTES = 512 * _MIB  # of all buffers together: far more than a device's cache holds
_SMALL = 200  # gradients in a slice
_SHARE = 0.85  # of the rate of a copy, for slices of 64 MiB and more


def check_bandwidth(
    device: torch.device, sizes_mib: Sequence[int] = (1, 4, 16, 64, 256)
) -> Finding:
    """Rates of copy, scale, cast, 8-bit codes, unpack and packing of small gradients."""
    require_kernels(device)
    figures: dict[str, float] = {}
    sizes = sizes_mib if device.type == "cuda" else sizes_mib[:2]
    largest = max(sizes)
    for mib in sizes:
        for name, (work, moved) in _jobs(mib * _MIB, device).items():
            calls = max(8, min(256, _CACHE_BYTES // (mib * _MIB)))
            _repeat(work, 2)
            seconds = _device_seconds(functools.partial(_repeat, work, calls), device) / calls
            figures[f"{name}_{mib}mib_s"] = seconds
            figures[f"{name}_{mib}mib_bytes_per_s"] = moved / seconds
    limit = figures[f"copy_{largest}mib_bytes_per_s"]
    texts, missed = [f"copy {limit / 1e12:.2f} TB/s"], []
    for name in ("scale", "cast", "encode", "unpack", "small"):
        for mib in (64, 256):
            share = figures.get(f"{name}_{mib}mib_bytes_per_s", limit) / limit
            if share < _SHARE and name != "small" and device.type == "cuda":
                missed.append(f"{name} of {mib} MiB at {share:.0%} of a copy's rate")
        share = figures[f"{name}_{largest}mib_bytes_per_s"] / limit
        texts.append(f"{name} {share:.0%} of it")
    texts.append(
        f"{_SMALL} gradients in 1 MiB: {1e6 * figures['small_1mib_s']:.0f} us in one launch, "
        f"{1e6 * figures['operators_1mib_s']:.0f} us by operators"
    )
    return Finding("; ".join(texts), figures, "; ".join(missed))


def _repeat(work: Callable[[int], object], calls: int) -> None:
    for number in range(calls):
        work(number)


def _jobs(size: int, device: torch.device) -> dict[str, tuple[Callable[[int], object], float]]:
    """By name: a job on float32 of ``size`` bytes in the buffers of that number, bytes it moves.

    The buffers take turns, or else the cache would answer in place of the memory.
    """
    elements = size // 4
    sets = max(2, min(64, _CACHE_BYTES // (2 * size))) if device.type == "cuda" else 2

    def buffers(dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(elements, dtype=dtype, device=device) for _ in range(sets)]

    gradients, wide, residuals = (buffers(torch.float32) for _ in range(3))
    narrow = buffers(torch.bfloat16)
    # As in a layout, where each gradient starts at a multiple of 64 bytes.
    apart = -(-elements // _SMALL // 16) * 16
    small = [[list(of[i].split(apart)) for i in range(sets)] for of in (gradients, wide)]

    def unpack(i: int) -> None:
        native.unpack([narrow[i % sets]], [wide[i % sets]], 0.5, squares=True)

    def pack_small(i: int) -> None:
        native.pack(small[0][i % sets], small[1][i % sets], 0.5)

    def operators(i: int) -> None:
        for gradient, place in zip(small[0][i % sets], small[1][i % sets], strict=True):
            torch.mul(gradient, 0.5, out=place)

    def pack(i: int) -> None:
        native.pack([gradients[i % sets]], [narrow[i % sets]], 0.5)

    def encode(i: int) -> None:
        native.encode(gradients[i % sets], native.WireFormat.INT8, residuals[i % sets])

    finish(device)
    return {
        "copy": (lambda i: wide[i % sets].copy_(gradients[i % sets]), 8.0 * elements),
        "scale": (
            lambda i: torch.mul(gradients[i % sets], 0.5, out=wide[i % sets]), 8.0 * elements
        ),
        "cast": (pack, 6.0 * elements),
        "encode": (encode, 13.0 * elements),
        "unpack": (unpack, 6.0 * elements),
        "small": (pack_small, 8.0 * elements),
        "operators": (operators, 8.0 * elements),
    }  # fmt: skip


def _device_seconds(work: Callable[[], None], device: torch.device) -> float:
    """Seconds between two events around ``work``; on devices without timed events, of the host."""
    finish(device)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    started = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - started
