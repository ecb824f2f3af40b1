"""Requirements of ``import hvd_order.torch``, and advice when one is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hvd_order._native.torch_engines import ENGINE, engine_releases, torch_release

__all__ = ["build_command", "require_extension", "require_torch", "why_no_engine"]

_OLDEST_TORCH = (2, 8)
_CAME_FROM = "direct_url.json"


def require_torch() -> None:
    """Checks that a recent enough PyTorch can be imported.

    Raises:
        ImportError: PyTorch is missing, too old or unsuitable; the message says what to install.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            "hvd_order.torch needs PyTorch, which is not installed; install it with: "
            "pip install torch (see https://pytorch.org for GPU builds); an hvd_order that was "
            f"built without PyTorch must then be built again: {_how_to_build()}"
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
    try:
        importlib.import_module(ENGINE)
    except ModuleNotFoundError as error:
        if error.name != ENGINE:
            raise
        raise ImportError(why_no_engine()) from None
    except ImportError as error:
        raise ImportError(
            f"the engine for PyTorch {torch_release()} cannot be loaded; build it for "
            f"this one: {_how_to_build()} ({error})"
        ) from error


def why_no_engine() -> str:
    """Why there is no engine for the installed PyTorch, and how to build one."""
    why = "the engine was not built, since PyTorch was not there; build it"
    if there := engine_releases():
        why = (
            f"this installation has engines for PyTorch {', '.join(there)}, and none for the "
            f"installed {torch_release()}; install one of those, or build the engine"
        )
    return f"{why}: {_how_to_build()}"


def _how_to_build() -> str:
    """The command that builds this installation's engine."""
    root = Path(__file__).resolve().parents[2]
    if (root / "Makefile").exists():
        return f"make -C {shlex.quote(str(root))} build"
    try:
        return build_command(importlib.metadata.distribution("hvd_order").read_text(_CAME_FROM))
    except importlib.metadata.PackageNotFoundError:
        return build_command(None)


def build_command(came_from: str | None) -> str:
    """The command that installs hvd_order anew from its source.

    Args:
        came_from: what pip has noted of the installed one (PEP 610); None: it is from an index.
    """
    again = "pip install --force-reinstall --no-deps"
    if came_from is None:
        return f"{again} --no-binary hvd_order hvd_order"
    noted = json.loads(came_from)
    url = noted["url"]
    if url.endswith(".whl"):
        return f"{again} SOURCE, hvd_order's source distribution, in place of the wheel {url}"
    if "vcs_info" in noted:
        url = "{vcs}+{url}@{commit_id}".format(url=url, **noted["vcs_info"])
    elif "dir_info" in noted:
        url = unquote(urlsplit(url).path)
    return f"{again} {shlex.quote(url)}"
