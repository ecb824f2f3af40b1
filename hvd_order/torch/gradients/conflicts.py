"""Finds other averagers of the same gradients: DDP, FSDP, Horovod, a second DistributedOptimizer.

Two averagers average twice, and the weights are wrong without an error. A parameter itself does
not show that DDP or another optimizer uses it, so the first backward pass of a model searches for
them. Optimizers of hvd_order register here. Objects of other libraries are searched for once with
the garbage collector, and only where they can exist (DDP and FSDP need a default process group,
which `init` does not make).

An optimizer may follow another on the same parameters once the first one is garbage. An optimizer
in a reference cycle can be garbage without having been collected, and its hooks still fire. So
garbage is collected when a following optimizer is made, and, while a conflict is in doubt, once
more before a hook takes a reference to it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hvd_order.base.errors import HvdOrderError, InvalidUsage
from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []


class Exchange(Protocol):
    """The part of a GradientExchange that this module needs."""

    def entry_of(self, parameter: torch.Tensor) -> ParameterEntry | None:
        """The entry of a parameter, None if this exchange does not have it."""

    def flush(self) -> None:
        """Applies every deferred update."""


_ACCELERATE_FSDP = " (with Accelerate: no fsdp_plugin, and ACCELERATE_USE_FSDP not set)"
_living: weakref.WeakSet[Exchange] = weakref.WeakSet()
_in_doubt: weakref.WeakSet[Exchange] = weakref.WeakSet()  # share a parameter, or have done so


def register(exchange: Exchange, entries: Sequence[ParameterEntry]) -> None:
    """Registers an exchange as averaging gradients of these parameters, until it is collected."""
    _living.add(exchange)
    others = [other for _, other in _with_others(exchange, entries)]
    if not others:
        return
    while others:
        with contextlib.suppress(HvdOrderError):  # from a job that has ended
            others.pop().flush()  # its deferred updates would keep it alive
    gc.collect()
    _in_doubt.update(other for _, other in _with_others(exchange, entries))
    if _in_doubt:
        _in_doubt.add(exchange)


def collect_garbage() -> None:
    """Ends unreachable exchanges; call it before a hook takes a reference to its exchange."""
    if _in_doubt:
        gc.collect()


def in_doubt(exchange: Exchange) -> bool:
    """Whether the exchange must be checked again."""
    return exchange in _in_doubt


def refuse(exchange: Exchange, entries: Sequence[ParameterEntry], rank: int) -> None:
    """Raises if another object averages gradients of these parameters.

    Raises:
        InvalidUsage: names the parameter, the other averager, and the cure.
    """
    for entry, _ in _with_others(exchange, entries):
        raise InvalidUsage(
            f"rank {rank}: parameter '{entry.name}' belongs to two distributed optimizers: its "
            "gradients would be averaged twice. Wrap one optimizer for a parameter; to replace an "
            "old one delete it first, with all that holds it (a scheduler, a list)"
        )
    _in_doubt.discard(exchange)
    _refuse_wrapped(entries, rank, _wrapper_types())


def refuse_sharded(entries: Sequence[ParameterEntry], rank: int) -> None:
    """Raises if FSDP has these parameters; its pieces differ by rank, so they cannot form a model.

    Raises:
        InvalidUsage: same as `refuse`.
    """
    for entry in entries:
        if type(entry.parameter).__name__ == "DTensor":
            raise InvalidUsage(_explain_dtensor(entry, rank))
    _refuse_wrapped(entries, rank, _fsdp())


def _explain_dtensor(entry: ParameterEntry, rank: int) -> str:
    tensor: Any = entry.parameter
    begin = f"rank {rank}: parameter '{entry.name}' "
    module = sys.modules.get("torch.distributed.fsdp")
    fully_sharded = getattr(module, "FSDPModule", None)
    if fully_sharded and any(
        tensor is parameter
        for found in _objects((fully_sharded,))
        for parameter in found.parameters()
    ):
        return begin + (
            "is sharded by fully_shard(), which averages its gradients as well. Train the model "
            "without fully_shard(), or without DistributedOptimizer"
            + (_ACCELERATE_FSDP if "accelerate" in sys.modules else "")
        )
    mesh = tensor.device_mesh
    dims = mesh.mesh_dim_names or tuple(f"dim {i}" for i in range(mesh.ndim))
    places = ", ".join(
        f"{dim} of {size}: {placement!r}"
        for dim, size, placement in zip(dims, mesh.shape, tensor.placements, strict=True)
    )
    return begin + (
        f"is a DTensor, divided over a device mesh by tensor parallelism (parallelize_module, "
        f"distribute_tensor): {places}. Ranks have different pieces of it, which hvd_order cannot "
        "average. Train without the plan that divides it; or combine tensor parallelism with DDP "
        "or fully_shard() over another dimension of the mesh, without DistributedOptimizer"
    )


def _refuse_wrapped(
    entries: Sequence[ParameterEntry], rank: int, wrappers: tuple[type, ...]
) -> None:
    if _find_wrapper(entries, wrappers) is None:
        return
    gc.collect()  # an unreachable one does not count
    if (found := _find_wrapper(entries, wrappers)) is not None:
        raise InvalidUsage(_explain(*found, rank))


def _with_others(
    exchange: Exchange, entries: Sequence[ParameterEntry]
) -> Iterator[tuple[ParameterEntry, Exchange]]:
    """The other exchanges that have any of these parameters, each with one such parameter."""
    for other in list(_living):
        if other is not exchange:
            shared = (entry for entry in entries if other.entry_of(entry.parameter) is not None)
            if (entry := next(shared, None)) is not None:
                yield entry, other


# ---- what others have made --------------------------------------------------------------------


def _find_wrapper(
    entries: Sequence[ParameterEntry], wrappers: tuple[type, ...]
) -> tuple[torch.nn.Module | torch.optim.Optimizer, ParameterEntry] | None:
    if not wrappers:
        return None
    by_id = {id(entry.parameter): entry for entry in entries}
    for wrapper in _objects(wrappers):
        for parameter in _averaged_by(wrapper):
            if (entry := by_id.get(id(parameter))) is not None:
                return wrapper, entry
    return None


def _wrapper_types() -> tuple[type, ...]:
    """Classes whose objects, if any can exist, average their own parameters' gradients."""
    types = [*_fsdp()]
    if dist.is_initialized():
        types.append(torch.nn.parallel.DistributedDataParallel)
    if "horovod.torch.mpi_lib_v2" in sys.modules:  # the real one; our alias has no such module
        types.append(torch.optim.Optimizer)
    return tuple(types)


def _fsdp() -> tuple[type, ...]:
    module = sys.modules.get("torch.distributed.fsdp")
    return (module.FullyShardedDataParallel,) if module and dist.is_initialized() else ()


def _objects(types: tuple[type, ...]) -> Iterator[Any]:
    for found in gc.get_objects():
        if issubclass(type(found), types):  # not isinstance(), which asks proxies for their class
            yield found


def _averaged_by(wrapper: Any) -> Iterator[torch.Tensor]:
    if isinstance(wrapper, torch.optim.Optimizer):
        of_horovod = getattr(type(wrapper), "_allreduce_grad_async", None)
        if getattr(of_horovod, "__module__", "").startswith("horovod."):
            for group in wrapper.param_groups:
                yield from group["params"]
        return
    ignored = getattr(wrapper, "parameters_to_ignore", ())  # DDP's
    spared = {id(parameter) for parameter in getattr(wrapper, "_ignored_params", ())}  # FSDP's
    for name, parameter in wrapper.module.named_parameters():
        if name not in ignored and id(parameter) not in spared:
            yield parameter


@dataclass(frozen=True)
class _Maker:
    """A library's class whose objects wrap models automatically.

    Attributes:
        modules: modules that may define the class.
        wrapped: the models that an object has wrapped, before or after.
        cure: the setting that avoids the wrapping.
    """

    modules: tuple[str, ...]
    name: str
    wrapped: Callable[[Any], Sequence[object]]
    cure: str


# The first match is named: Trainer has an Accelerator, which holds its model as well.
_MAKERS = (
    _Maker(
        ("transformers.trainer",),
        "Trainer",
        lambda trainer: [trainer.model_wrapped, trainer.model],
        "transformers.Trainer has wrapped it, as Accelerate does where LOCAL_RANK or WORLD_SIZE is "
        "set. Call trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True) before "
        "trainer.train(): then the model stays as it is",
    ),
    _Maker(
        ("accelerate.accelerator",),
        "Accelerator",
        lambda accelerator: accelerator._models,
        "Accelerator.prepare() has wrapped it, as it does where LOCAL_RANK or WORLD_SIZE is set. "
        "Use accelerator.prepare_model(model, evaluation_mode=True) for the model: then it stays "
        "as it is",
    ),
    _Maker(
        ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
        "Trainer",
        lambda trainer: [trainer.strategy.model],
        'Lightning\'s strategy has wrapped it. Use Trainer(devices=1, strategy="auto"): one '
        "device for each process that the launcher starts",
    ),
)


def _explain(wrapper: Any, entry: ParameterEntry, rank: int) -> str:
    if isinstance(wrapper, torch.optim.Optimizer):
        return (
            f"rank {rank}: parameter '{entry.name}' belongs to an optimizer that Horovod's own "
            "DistributedOptimizer has made: its gradients would be averaged twice. Wrap the plain "
            "optimizer, and import one of both libraries (HVD_ORDER_ALIAS=1 gives hvd_order to "
            "those who import horovod)"
        )
    kind = type(wrapper).__name__
    what = (
        f"rank {rank}: parameter '{entry.name}' is in a {kind} module, which averages its "
        "gradients as well: they would be averaged twice. "
    )
    return what + (
        _who_made(wrapper)
        or f"Train the model without {kind}, or without DistributedOptimizer; a {kind} of former "
        "training must be deleted first"
    )


def _who_made(wrapper: Any) -> str | None:
    for maker in _MAKERS:
        types = tuple(
            getattr(sys.modules[module], maker.name)
            for module in maker.modules
            if module in sys.modules
        )
        for one in _objects(types) if types else ():
            if any(model is wrapper or model is wrapper.module for model in maker.wrapped(one)):
                return maker.cure
    return None
