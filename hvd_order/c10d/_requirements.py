"""Requirements of ``import hvd_order.torch``, and advice when one is missing."""

from __future__ import annotations

import importlib
import importlib.util

__all__ = ["require_extension", "require_torch"]

_OLDEST_TORCH = (2, 8)


def require_torch() -> None:
    """Checks that a recent enough PyTorch can be imported.

    Raises:
        ImportError: PyTorch is missing, too old or unsuitable; the message says what to install.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            "hvd_order.torch needs PyTorch, which is not installed; install it with: "
            "pip install torch (see https://pytorch.org for GPU builds), then build hvd_order "
            "again with: pip install --no-build-isolation ."
        )
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise ImportError(
            f"hvd_order.torch needs PyTorch {oldest} or newer, found {torch.__version__}; "
            "install a newer one with: pip install --upgrade torch"
        )
    if not torch.distributed.is_available():
        raise ImportError(
            "this PyTorch was built without torch.distributed, which hvd_order.torch needs; "
            "install another build with: pip install torch"
        )


def require_extension() -> None:
    """Checks that the native engine for PyTorch was built and fits the installed PyTorch.

    Raises:
        ImportError: the engine is missing or was built for another PyTorch; the message says how
            to build it.
    """
    cure = "build it with: pip install --no-build-isolation . (in a checkout: make build)"
    try:
        importlib.import_module("hvd_order._torch")
    except ModuleNotFoundError as error:
        if error.name != "hvd_order._torch":
            raise
        raise ImportError(
            "the engine hvd_order._torch was not built, because PyTorch was not there when "
            f"hvd_order was installed; {cure}"
        ) from None
    except ImportError as error:
        raise ImportError(
            "the engine hvd_order._torch cannot be loaded; it was probably built for another "
            f"PyTorch; {cure} ({error})"
        ) from error
