"""Code in C++ that looks at tensors without asking Python, as extensions do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from random_programs.world import World
from torch import Tensor
from torch.utils.dlpack import from_dlpack

T = TypeVar("T")


def despite_lock(world: World, read: Callable[[], T]) -> T:
    """What ``read`` gives, if need be after what the error advises.

    Such a reader may meet the lock on what is not finished (docs/architecture.md): an error in
    place of a wrong number.
    """
    try:
        return read()
    except RuntimeError as error:
        advice = [name for name in ("synchronize", "flush") if f"optimizer.{name}()" in str(error)]
        if not world.on_ranks or not advice:
            raise
        getattr(world.optimizer, advice[0])()
        return read()


@functools.cache
def _group() -> dist.ProcessGroupGloo:
    """A group of this process alone; one for the life of the process."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))


def copied_by_gloo(tensor: Tensor) -> Tensor:
    """An extension with pybind11: it gets the tensor's address and copies from there."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    with torch.no_grad():
        _group().allgather([[out]], [tensor]).wait()
    return out


def alias_by_dlpack(tensor: Tensor) -> Tensor:
    """Another tensor over the same memory, by code that asks nobody."""
    return from_dlpack(torch._C._to_dlpack(tensor))


def copied_by_dlpack(tensor: Tensor) -> Tensor:
    return alias_by_dlpack(tensor.detach() if tensor.requires_grad else tensor).clone()


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.detach() * 2


_script = functools.cache(torch.jit.script)


def doubled_by_script(tensor: Tensor) -> Tensor:
    """TorchScript's interpreter."""
    doubled: Tensor = _script(_doubled)(tensor)
    return doubled


C_READERS: tuple[Callable[[Tensor], Tensor], ...] = (
    copied_by_gloo,
    copied_by_dlpack,
    doubled_by_script,
)
