"""Gives all ranks the same state: parameters, optimizer state and Python objects."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hvd_order.base.errors import HorovodInternalError, InvalidUsage
from hvd_order.engine.job import process
from hvd_order.engine.job.group_collectives import bytes_of
from hvd_order.engine.process_sets import (
    ProcessSet,
    check_root,
    global_process_set,
    queue_for,
)
from hvd_order.engine.requests.queues import collective_queue
from hvd_order.engine.requests.request import Request
from hvd_order.torch.collectives.single import allgather, broadcast_, broadcast_async_, synchronize

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

# Small tensors are fused: one collective of this size costs far less than many small ones.
_FUSED_BYTES = 32 * 2**20


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[torch.Tensor | tuple[str, torch.Tensor]], root_rank: int
) -> None:
    """Overwrites tensors on all ranks with those of rank `root_rank`.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: the rank whose values are sent.

    Raises:
        InvalidUsage: something in `params` is not a dense tensor.
        ModelMismatch: ranks have different names, shapes or dtypes; names the first difference (on
            every rank).
    """
    named = _named_tensors(params)
    check_root(root_rank, global_process_set)
    _check_same([f"broadcast_parameters root_rank={root_rank}", *_manifest(named)])
    _broadcast_tensors([tensor for _, tensor in named], root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Gives every rank the optimizer state and hyper-parameters of rank `root_rank`.

    Unlike Horovod's function, this one takes no hidden step to create state. Afterwards no rank
    has state that the root lacks, so training continues exactly as on the root. LBFGS works as
    well. The optimizer's ``param_groups`` and their dictionaries stay the same objects. Of an
    optimizer with ``sharded=True`` only hyper-parameters are sent: the ranks share one state.

    Args:
        optimizer: any optimizer; on every rank of the same class over the same parameters.
        root_rank: the rank whose state is sent.
        model: not needed; accepted because Horovod does.

    Raises:
        ModelMismatch: ranks have different parameters or groups (raised on every rank).
        HorovodInternalError: the root's state cannot be pickled.
    """
    check_root(root_rank, global_process_set)
    _check_same(_optimizer_manifest(optimizer, root_rank))
    if process.size() == 1:
        return
    is_root = process.rank() == root_rank
    tensors: list[torch.Tensor] = []
    state_dict, load_state_dict = _methods(optimizer)
    skeleton = _take_tensors(state_dict(), tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank, name="optimizer_state")
    if is_root:
        _broadcast_tensors(tensors, root_rank)
        return
    parameters = _parameters(optimizer)
    specs: list[_TensorPlaceholder] = []
    _find_specs(skeleton, specs)
    tensors = [spec.empty(_device_like(spec, parameters)) for spec in specs]
    _broadcast_tensors(tensors, root_rank)
    _load_in_place(optimizer, _put_tensors(skeleton, iter(tensors)), parameters, load_state_dict)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank `root_rank`, on every rank; sent as a pickle.

    Uses cloudpickle if installed (it also supports lambdas), else pickle.

    Args:
        obj: the object to send; used only on the root.
        root_rank: rank in the job, as in Horovod, whose object is sent.
        name: shown in errors.
        process_set: the ranks that take part; only they may call.

    Returns:
        `obj` itself on the root, a copy on the other ranks.

    Raises:
        HorovodInternalError: the root's object cannot be pickled (raised on every rank).
    """
    queue_for(process_set)
    check_root(root_rank, process_set)
    if len(process_set.ranks) == 1:
        return obj
    name = name or "object"
    is_root = process.rank() == root_rank
    message = _pack(obj) if is_root else b""
    length = torch.tensor([len(message)])
    broadcast_(length, root_rank, f"{name}.length", process_set)
    data = _byte_tensor(message) if is_root else torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.bytes", process_set)
    return _unpack(message if is_root else bytes_of(data), root_rank, obj if is_root else None)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in rank order, on every rank; sent as pickles.

    Args:
        obj: this rank's object.
        name: shown in errors.
        process_set: the ranks that take part; only they may call.

    Raises:
        HorovodInternalError: a rank's object cannot be pickled (raised on every rank).
    """
    queue_for(process_set)
    if len(process_set.ranks) == 1:
        return [obj]
    name = name or "object"
    message = _pack(obj)
    lengths = allgather(torch.tensor([len(message)]), f"{name}.lengths", process_set).tolist()
    gathered = bytes_of(allgather(_byte_tensor(message), f"{name}.bytes", process_set))
    objects = []
    start = 0
    for rank, length in zip(process_set.ranks, lengths, strict=True):
        own = obj if rank == process.rank() else None
        objects.append(_unpack(gathered[start : start + length], rank, own))
        start += length
    return objects


# ---- tensors ----


def _named_tensors(params: object) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise InvalidUsage(
            f"invalid params of type: {type(params)}; expected model.state_dict() or "
            "model.named_parameters()"
        )
    items: list[Any] = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    named = []
    for place, item in enumerate(items):
        key, tensor = item if isinstance(item, tuple) else (f"#{place}", item)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidUsage(
                f"{key!r} is of type {type(tensor).__name__}, not a tensor; send it with "
                "broadcast_object()"
            )
        if tensor.layout is not torch.strided:
            raise InvalidUsage(f"{key!r} is {tensor.layout}; only dense tensors can be broadcast")
        named.append((str(key), tensor))
    return named


def _manifest(named: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    return [
        f"{name} {tensor.dtype} {list(tensor.shape)} on {tensor.device.type}"
        for name, tensor in named
    ]


def _check_same(lines: list[str]) -> None:
    """Raises ModelMismatch on every rank unless all have the same lines."""
    queue = collective_queue()
    name = queue.next_name("check")
    queue.run(Request(name, lines, _no_exchange, _no_result, torch.device("cpu")))


def _no_exchange(group: dist.ProcessGroup | None) -> None:
    """Exchanges nothing: the comparison of the lines is enough."""


def _no_result() -> None:
    """Returns nothing: there is no result."""


def _broadcast_tensors(tensors: Sequence[torch.Tensor], root_rank: int) -> None:
    """Overwrites `tensors` with the root's; every rank must have checked that they match.

    Packs the next chunk while one is being sent.
    """
    if process.size() == 1:
        return
    is_root = process.rank() == root_rank
    queue = collective_queue()
    travelling: tuple[int, torch.Tensor, list[torch.Tensor]] | None = None
    for chunk in _chunks(tensors):
        first = chunk[0]
        flat = torch.empty(sum(t.numel() for t in chunk), dtype=first.dtype, device=first.device)
        if is_root:
            _pack_flat(chunk, flat)
        handle = broadcast_async_(flat, root_rank, queue.next_name("fused"))
        if travelling is not None:
            _arrive(*travelling, is_root)
        travelling = (handle, flat, chunk)
    if travelling is not None:
        _arrive(*travelling, is_root)


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups tensors of one dtype and device; a chunk exceeds `_FUSED_BYTES` only with a single
    tensor.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in alike.values():
        chunk: list[torch.Tensor] = []
        chunk_bytes = 0
        for tensor in group:
            tensor_bytes = tensor.numel() * tensor.element_size()
            if chunk and chunk_bytes + tensor_bytes > _FUSED_BYTES:
                yield chunk
                chunk, chunk_bytes = [], 0
            chunk.append(tensor)
            chunk_bytes += tensor_bytes
        yield chunk


def _pack_flat(chunk: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    start = 0
    with torch.no_grad():
        for tensor in chunk:
            flat[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel()


def _arrive(handle: int, flat: torch.Tensor, chunk: Sequence[torch.Tensor], is_root: bool) -> None:
    synchronize(handle)
    if is_root:
        return
    start = 0
    with torch.no_grad():
        for tensor in chunk:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


# ---- optimizer state ----


@dataclass(frozen=True)
class _TensorPlaceholder:
    """Placeholder for a tensor in a pickled structure."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a spec in place of each dense tensor; appends the tensors to `tensors`, in
    order.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value)
        return _TensorPlaceholder(value.dtype, tuple(value.shape), value.device.type)
    return _rebuild(value, lambda inner: _take_tensors(inner, tensors))


def _find_specs(value: Any, specs: list[_TensorPlaceholder]) -> Any:
    """Appends the specs in `value` to `specs`, in the order of `_take_tensors`."""
    if isinstance(value, _TensorPlaceholder):
        specs.append(value)
        return value
    return _rebuild(value, lambda inner: _find_specs(inner, specs))


def _put_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The inverse of `_take_tensors`."""
    if isinstance(value, _TensorPlaceholder):
        return next(tensors)
    return _rebuild(value, lambda inner: _put_tensors(inner, tensors))


def _rebuild(value: Any, change: Any) -> Any:
    """A copy of nested dictionaries, lists and tuples with `change` applied to their elements."""
    if type(value) is dict:
        return {key: change(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(inner) for inner in value)
    return value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters in the order in which a state_dict numbers them."""
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    return list({id(p): p for p in ordered}.values())


def _optimizer_manifest(optimizer: torch.optim.Optimizer, root_rank: int) -> list[str]:
    lines = [f"broadcast_optimizer_state of {type(optimizer).__name__} root_rank={root_rank}"]
    for index, group in enumerate(optimizer.param_groups):
        lines.append(f"group {index} with {len(group['params'])} parameters")
        for place, p in enumerate(group["params"]):
            lines.append(f"group {index} parameter {place} {p.dtype} {list(p.shape)}")
    return lines


def _device_like(spec: _TensorPlaceholder, parameters: Sequence[torch.Tensor]) -> torch.device:
    """This rank's device for a tensor that the root has on a device of the same type."""
    for parameter in parameters:
        if parameter.device.type == spec.device_type:
            return parameter.device
    return torch.device(spec.device_type)


def _methods(
    optimizer: Any,
) -> tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]:
    """``state_dict`` and ``load_state_dict``. Those of a sharded optimizer are collective, so its
    class's own are taken, which see its groups and no state.
    """
    exchange = getattr(optimizer, "_hvd_exchange", None)
    if exchange is None or exchange.shards is None:
        return optimizer.state_dict, optimizer.load_state_dict
    base = optimizer._hvd_base
    return partial(base.state_dict, optimizer), partial(base.load_state_dict, optimizer)


def _load_in_place(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    parameters: list[torch.Tensor],
    load_state_dict: Callable[[dict[str, Any]], None],
) -> None:
    """``load_state_dict`` that keeps the groups' identity and the state as it is on the root.

    torch replaces the list of groups, the groups and the state dictionary, which schedulers and
    wrappers may hold. It also casts state to the dtype of its parameter.
    """
    groups, dictionaries = optimizer.param_groups, list(optimizer.param_groups)
    state = optimizer.state
    exact = {
        parameters[index]: values
        for index, values in state_dict.get("state", {}).items()
        if isinstance(index, int) and index < len(parameters)
    }
    load_state_dict(state_dict)
    if optimizer.param_groups is not groups:
        for old, new in zip(dictionaries, optimizer.param_groups, strict=True):
            old.clear()
            old.update(new)
        groups[:] = dictionaries
        optimizer.param_groups = groups
    if optimizer.state is not state:
        loaded = dict(optimizer.state)
        state.clear()
        state.update(loaded)
        optimizer.state = state
    for parameter, values in exact.items():
        own = state.get(parameter)
        if isinstance(own, dict) and isinstance(values, dict):
            own.update(values)


# ---- objects ----


def _pickler() -> types.ModuleType:
    try:
        import cloudpickle
    except ImportError:
        return pickle
    module: types.ModuleType = cloudpickle
    return module


def _pack(obj: Any) -> bytes:
    """A byte that states whether pickling worked, then the pickle or the error's text."""
    try:
        return b"\0" + bytes(_pickler().dumps(obj))
    except Exception as error:  # any error of an object's own code; sent to all ranks
        return b"\1" + f"{type(error).__name__}: {error}".encode()


def _unpack(message: bytes, rank: int, own: Any) -> Any:
    """The object in a message of `rank`, or `own` if that is not None."""
    if message[:1] != b"\0":
        raise HorovodInternalError(
            f"the object of rank {rank} cannot be pickled: {message[1:].decode(errors='replace')}"
        )
    return pickle.loads(message[1:]) if own is None else own


def _byte_tensor(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
