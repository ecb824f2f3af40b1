"""What carries TensorFlow's gradients, and what to install where it is missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from hvd_order.base.errors import InvalidUsage

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)


def test_without_pytorch_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvd_order.tensorflow.backend.interface import backend

    find = importlib.util.find_spec

    def without_torch(name: str, package: str | None = None) -> Any:
        return None if name == "torch" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_torch)
    with pytest.raises(InvalidUsage, match="pip install torch"):
        backend.__wrapped__()
