"""One line each for devices and kernels, on machines that cannot exist here."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_order.tools.doctor.devices import cuda_line, kernels_line

WITHOUT_NVCC = {"compiled_for": "", "why_not": "hvd_order was built where nvcc was not found"}
COMPILED = {"compiled_for": "sm_80 sm_90 and newer", "why_not": ""}


def torch(cuda: str | None = None, rocm: str | None = None, *devices: str) -> dict[str, Any]:
    facts = {"cuda": cuda, "rocm": rocm, "devices": list(devices)}
    return {"works": True, "version": "2.13.0", **facts}


@pytest.mark.parametrize(
    ("facts", "driver", "line"),
    [
        (
            torch(),
            None,
            "none: PyTorch 2.13.0 is built for the CPU, and there is no NVIDIA driver",
        ),
        (
            torch(),
            12040,
            "none: PyTorch 2.13.0 is built for the CPU, the driver supports CUDA 12.4; install a "
            "PyTorch for CUDA",
        ),
        (
            torch("13.0"),
            None,
            "none: PyTorch is built for CUDA 13.0, but there is no NVIDIA driver",
        ),
        (
            torch("13.0"),
            12020,
            "none: the driver supports CUDA 12.2, PyTorch is built for 13.0; update the driver, or "
            "install a PyTorch for CUDA 12",
        ),
        (
            torch("12.8"),
            13000,
            "none: PyTorch and driver fit, but no device is visible (CUDA_VISIBLE_DEVICES?)",
        ),
        (
            torch("12.8"),
            12040,
            "none: PyTorch and driver fit, but no device is visible (CUDA_VISIBLE_DEVICES?)",
        ),
        (torch("12.8", None, "NVIDIA H100", "NVIDIA H100"), 13000, "NVIDIA H100, NVIDIA H100"),
        (torch(None, "7.1"), None, "none: ROCm 7.1 sees no device"),
        ({"works": False}, None, "no PyTorch"),
    ],
)
def test_devices(facts: dict[str, Any], driver: int | None, line: str) -> None:
    assert cuda_line(facts, driver) == line


def test_kernels() -> None:
    assert kernels_line(torch(), WITHOUT_NVCC) == "not needed: PyTorch is not built for CUDA"
    assert kernels_line(torch(), COMPILED) == (
        "not needed: PyTorch is not built for CUDA (compiled for sm_80 sm_90 and newer)"
    )
    assert kernels_line(torch("13.0"), WITHOUT_NVCC) == (
        "not used: hvd_order was built where nvcc was not found"
    )
    assert kernels_line(torch("13.0"), COMPILED) == "compiled for sm_80 sm_90 and newer"
