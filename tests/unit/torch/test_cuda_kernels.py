"""The kernels for CUDA as far as a machine without a GPU shows them; tests/gpu runs them."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch

from hvd_order._native import _torch as native
from hvd_order.torch import kernels

without_nvcc = pytest.mark.skipif(
    importlib.util.find_spec("hvd_order._native._cuda") is None,
    reason="hvd_order was built without nvcc: pip install -r requirements/cuda.txt",
)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


@without_nvcc
def test_compiled_for_what_is_promised() -> None:
    cuda = importlib.import_module("hvd_order._native._cuda")
    assert cuda.ARCHITECTURES == "sm_80 sm_90 sm_100 and newer"
    runtime, _, _ = cuda.state()
    assert runtime >= 12010


@without_nvcc
@without_gpu
def test_without_a_driver_they_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels.kernels_for.__wrapped__("cuda")
    assert found.compiled_for == "sm_80 sm_90 sm_100 and newer"
    assert found.why_not.startswith("CUDA says: ")
    monkeypatch.setattr(
        importlib.import_module("hvd_order._native._cuda"),
        "state",
        lambda: (13000, 12040, "anything"),
    )
    assert kernels.kernels_for.__wrapped__("cuda").why_not == (
        "the driver supports CUDA 12.4, hvd_order's kernels were compiled with 13.0; update the "
        "driver, or build with an older nvcc"
    )


def test_without_nvcc_they_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hvd_order._native._cuda", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Hidden(), *sys.meta_path])
    why = kernels.kernels_for.__wrapped__("cuda").why_not
    assert "nvcc was not found" in why
    assert "requirements/cuda.txt" in why
    assert kernels.kernels_for.__wrapped__("xpu").why_not.endswith("not for xpu")


class _Hidden:
    """An import system that has no hvd_order._native._cuda."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "hvd_order._native._cuda":
            raise ModuleNotFoundError(name)


@without_nvcc
def test_other_objects_are_no_kernels() -> None:
    with pytest.raises(TypeError):
        native.register_kernels("cuda", 3)
