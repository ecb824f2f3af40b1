"""Requirements of ``import hvd_order.torch``, and advice when one is missing."""

from __future__ import annotations

import importlib
import importlib.util

from hvd_order._native.torch_engines import ENGINE, engine_releases, torch_release

__all__ = ["require_extension", "require_torch"]

_OLDEST_TORCH = (2, 8)
_BUILD = "pip install --no-binary hvd_order --force-reinstall hvd_order (in a checkout: make build)"


def require_torch() -> None:
    """Checks that a recent enough PyTorch can be imported.

    Raises:
        ImportError: PyTorch is missing, too old or unsuitable; the message says what to install.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            "hvd_order.torch needs PyTorch, which is not installed; install it with: "
            "pip install torch (see https://pytorch.org for GPU builds); an hvd_order that was "
            f"built without PyTorch must then be built again: {_BUILD}"
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
    """Checks that there is an engine for the installed PyTorch.

    Raises:
        ImportError: there is none, or it cannot be loaded; the message says how to build one.
    """
    release, there = torch_release(), engine_releases()
    try:
        importlib.import_module(ENGINE)
    except ModuleNotFoundError as error:
        if error.name != ENGINE:
            raise
        if there:
            why = (
                f"this installation has engines for PyTorch {', '.join(there)}, and none for the "
                f"installed {release}; install one of those, or build the engine"
            )
        else:
            why = "the engine was not built, since PyTorch was not there; build it"
        raise ImportError(f"{why}: {_BUILD}") from None
    except ImportError as error:
        raise ImportError(
            f"the engine for PyTorch {release} cannot be loaded; build it for "
            f"this one: {_BUILD} ({error})"
        ) from error
