"""One optimizer's shards: laid out anew with each registration, checkpointed as a whole."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hvd_order._native import _torch as native
from hvd_order.base.errors import InvalidUsage
from hvd_order.engine import live_exchanges
from hvd_order.engine.half_forms import choose_half_forms
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.shards import shard_state, sharded_dict
from hvd_order.torch.shards.piece import pieces_of
from hvd_order.torch.shards.shard_update import ShardUpdate
from hvd_order.torch.updates.partial_step import InnerStep

__all__: list[str] = []

# What all ranks give under a name, by rank.
NamedGather = Callable[[Any, str], list[Any]]

_CALL_ON_ALL = "{} of a sharded optimizer, which every rank has to call"
_FLOATING = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


def require_halves(parameters: Sequence[torch.Tensor]) -> None:
    """Refuses parameters whose sums cannot travel in halves, of whatever transport.

    Raises:
        InvalidUsage: they are on several devices, not floating-point numbers, or of another dtype
            than their gradients.
    """
    kinds = {(parameter.device, parameter.dtype) for parameter in parameters}
    devices = sorted({str(device) for device, _ in kinds})
    if len(devices) > 1:
        raise _no_halves(f"parameters are on several devices, {', '.join(devices)}")
    if not {dtype for _, dtype in kinds} <= _FLOATING:
        raise _no_halves("not all parameters are floating-point numbers")
    for parameter in parameters:
        if (dtype := native.gradient_dtype(parameter)) != parameter.dtype:
            raise _no_halves(
                f"the second half is a parameter of {parameter.dtype}, the first its gradient of "
                f"{dtype} (grad_dtype): leave grad_dtype as it is, or leave sharded out"
            )


def _no_halves(why: str) -> InvalidUsage:
    return InvalidUsage(f"sharded=True sends each sum in two halves, but {why}")


def _require_transport(channel: ModelChannel, parameters: Sequence[torch.Tensor]) -> None:
    """Measures the halves, unless they were measured before, with nothing in flight."""
    host = channel.host
    if host.job.config.split == "never":
        raise _no_halves("HVD_ORDER_SPLIT=never")
    require_halves(parameters)
    if not isinstance(host.transport, native.C10dTransport):
        raise _no_halves("Horovod's engine carries the gradients")
    for other in live_exchanges.live(host):
        other.flush()
    unknown = host.has_halves is None and live_exchanges.trained_elsewhere(host)
    if any(channel.gather("nothing in flight", unknown)):  # until all ranks have
        raise InvalidUsage(
            "an optimizer with sharded=True is made while another thread trains, and the first one "
            "measures the network with nothing in flight: make it before that thread begins"
        )
    if not parameters:
        return
    with channel.turn():
        has_halves = choose_half_forms(channel, parameters[0].device)
    if not has_halves:
        raise _no_halves("the back end of torch.distributed has no reduce-scatter or no all-gather")


class _StateElsewhere(defaultdict[torch.Tensor, Any]):
    """The ``state`` of a sharded optimizer: empty, but true once there is state in the shards.

    torch.distributed.checkpoint takes a step to make state where it finds none.
    """

    def __init__(self, shards: weakref.ref[ModelShards]) -> None:
        super().__init__(dict)
        self._shards = shards

    def __bool__(self) -> bool:
        shards = self._shards()
        return len(self) > 0 or (shards is not None and shards.has_state)


class ModelShards:
    """The shards of one model, and their state.

    Attributes:
        has_state: the optimizer has taken a step, or loaded state; the same on all ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: InnerStep,
        channel: ModelChannel,
        gather: NamedGather,
        entries: Sequence[ParameterEntry],
    ) -> None:
        """Starts before the first registration. Collective.

        Args:
            optimizer: of the user; its state is taken with the first registration.
            step: the ``step`` of its class.
            channel: of the model.
            gather: for the methods that a rank may call when others do not.
            entries: the trainable parameters.

        Raises:
            InvalidUsage: their sums cannot travel in halves.
        """
        _require_transport(channel, [entry.parameter for entry in entries])
        self._optimizer = weakref.ref(optimizer)
        self._channel = channel
        self._host = channel.host
        # Threads may call it for an optimizer each.
        self._gather: NamedGather = lambda mine, name: gather(
            mine, f"{name} (optimizer {channel.key})"
        )
        self._update = ShardUpdate(step)
        self._entries: Sequence[ParameterEntry] = ()  # in the order of all ranks
        self.has_state = False

    def update(
        self, optimizer: Optimizer, entries: Sequence[ParameterEntry], factor: float
    ) -> None:
        """See `ShardUpdate.update`."""
        self._update.update(optimizer, entries, factor)
        self.has_state = True

    def move(
        self,
        entries: Sequence[ParameterEntry],
        buffers: Sequence[torch.Tensor],
        layout: native.SliceLayout,
    ) -> None:
        """Takes new shards, and moves the state to the ranks that have its elements. Collective.

        Args:
            entries: by TensorId; the first time or later, with further ones.
            buffers, layout: of the gradients.

        Raises:
            InvalidUsage: the first time, only some ranks have state; on every rank.
        """
        pieces = pieces_of(entries, buffers, layout, self._host.rank, self._host.size)
        before, self._entries = self._entries, entries
        state: dict[torch.Tensor, dict[str, Any]] = {}
        if any(self._channel.gather("state", bool(self._update.state) or self._has_masters)):
            wholes = shard_state.gathered(
                before, self._update.pieces, self._update.state,
                lambda mine: self._channel.gather("shards", mine),
            )  # fmt: skip
            state.update(shard_state.cut(wholes, pieces))
        new = [entry for entry in entries if entry not in set(before)]
        state.update(shard_state.cut(shard_state.of_parameters(self._own_state(new)), pieces))
        self._update.take(pieces, state)

    @property
    def size_bytes(self) -> int:
        """Size of this rank's state and master copies."""
        state = [
            value.nbytes
            for values in self._update.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ]
        return sum(state) + sum(p.values.nbytes for p in self._update.pieces if p.is_master)

    @property
    def _has_masters(self) -> bool:
        return any(piece.has_master for piece in self._update.pieces)

    def _own_state(
        self, entries: Sequence[ParameterEntry]
    ) -> list[tuple[ParameterEntry, dict[str, Any]]]:
        """Takes the state that the optimizer itself has for the parameters."""
        optimizer = self._optimizer()
        assert optimizer is not None
        states = [(entry, optimizer.state.pop(entry.parameter, {})) for entry in entries]
        kinds = [(entry.name, sorted(state)) for entry, state in states]
        self._compare(self._channel.gather("kinds of state", kinds))
        found = [(entry, state) for entry, state in states if state]
        self.has_state |= bool(found)
        self._take_state_from(optimizer)
        return found

    def _take_state_from(self, optimizer: Optimizer) -> None:
        # Held by the optimizer alone: a second holder would end the overlap (STATE_HELD).
        optimizer.state = _StateElsewhere(weakref.ref(self))

    def _compare(self, kinds: Sequence[list[tuple[str, list[str]]]]) -> None:
        for rank, theirs in zip(self._host.ranks, kinds, strict=True):
            for (name, here), (_, there) in zip(kinds[0], theirs, strict=True):
                if here != there:
                    raise InvalidUsage(
                        f"the optimizer state of '{name}' is {here or 'empty'} on rank "
                        f"{self._host.ranks[0]} and {there or 'empty'} on rank {rank}. With "
                        "sharded=True every rank loads the checkpoint, or "
                        "broadcast_optimizer_state is called before DistributedOptimizer"
                    )

    # ---- checkpoints --------------------------------------------------------------------------

    def state_dict(self, optimizer: Optimizer, state_dict: Callable[[], Any]) -> dict[str, Any]:
        """The optimizer's ``state_dict`` with the whole state, in CPU memory. Collective.

        Args:
            optimizer: of the user.
            state_dict: the method of its class.
        """
        name = _CALL_ON_ALL.format("state_dict()")
        wholes = shard_state.gathered(
            self._entries, self._update.pieces, self._update.state,
            lambda mine: self._gather(mine, name),
        )  # fmt: skip
        own = optimizer.state
        whole = ((each[0].parameter, shard_state.for_parameter(each)) for each in wholes)
        optimizer.state = defaultdict(dict, whole)
        try:
            return cast("dict[str, Any]", state_dict())
        finally:
            optimizer.state = own

    def load_state_dict(
        self,
        optimizer: Optimizer,
        state_dict: dict[str, Any],
        load: Callable[[dict[str, Any]], None],
    ) -> None:
        """Loads a ``state_dict`` with the whole state, of any number of ranks. Collective.

        Args:
            optimizer: of the user.
            state_dict: the same on all ranks.
            load: the ``load_state_dict`` of its class.
        """
        load({**state_dict, "state": {}})
        self._take_state_from(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        places = [p for group in state_dict["param_groups"] for p in group["params"]]
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        saved = {
            id(parameter): {
                key: shard_state.placed_as_loaded(key, value, parameter, group)
                for key, value in state_dict["state"].get(place, {}).items()
            }
            for parameter, place, group in zip(parameters, places, groups, strict=True)
        }
        states = [(entry, saved.get(id(entry.parameter), {})) for entry in self._entries]
        kinds = [(entry.name, sorted(state)) for entry, state in states]
        self._compare(self._gather(kinds, _CALL_ON_ALL.format("load_state_dict()")))
        wholes = shard_state.of_parameters((entry, state) for entry, state in states if state)
        self.has_state = any(state for _, state in states)
        self._update.forget()
        self._update.take(self._update.pieces, shard_state.cut(wholes, self._update.pieces))

    def sharded_state_dict(
        self,
        optimizer: Optimizer,
        state_dict: Callable[[], Any],
        names: Mapping[torch.nn.Parameter, str],
    ) -> dict[str, Any]:
        """This rank's shards, for torch.distributed.checkpoint. Collective.

        Args:
            optimizer: of the user.
            state_dict: the method of its class.
            names: of its parameters.

        Raises:
            InvalidUsage: no default process group, or parameters without names.
        """
        if not dist.is_initialized():
            raise InvalidUsage(
                "torch.distributed.checkpoint has no process group, so each rank would write a "
                "checkpoint of its shards alone: call torch.distributed.init_process_group() "
                "before sharded_state_dict()"
            )
        groups = sharded_dict.groups_by_name(state_dict()["param_groups"], optimizer, names)
        call = _CALL_ON_ALL.format("sharded_state_dict()")
        shards = sharded_dict.shards_by_name(
            self._entries,
            {
                piece: values
                for piece, values in self._update.with_masters(optimizer, self.has_state).items()
                if piece.begin < piece.end  # a checkpoint has no place for no elements
            },
            lambda mine: self._gather(mine, call),
        )
        return {"state": shards, "param_groups": groups}

    def load_shards(
        self,
        optimizer: Optimizer,
        state_dict: dict[str, Any],
        load: Callable[[dict[str, Any]], None],
        names: Mapping[torch.nn.Parameter, str],
    ) -> None:
        """Loads what `sharded_state_dict` has returned. Collective; copies no shards.

        Args:
            optimizer: of the user.
            state_dict: with names for parameters.
            load: the ``load_state_dict`` of its class.
            names: of its parameters.

        Raises:
            InvalidUsage: it does not fit the optimizer or its shards; on every rank, and nothing
                has been loaded.
        """
        problem, state = "", {}
        try:
            sharded_dict.check_groups(state_dict["param_groups"], optimizer, names)
            pieces = [piece for piece in self._update.pieces if piece.begin < piece.end]
            state = sharded_dict.of_pieces(self._entries, pieces, state_dict["state"])
        except InvalidUsage as error:
            problem = str(error)
        call = _CALL_ON_ALL.format("load_state_dict() with shards")
        for rank, theirs in zip(self._host.ranks, self._gather(problem, call), strict=True):
            if theirs:
                raise InvalidUsage(f"rank {rank}: {theirs}")
        load({**state_dict, "state": {}})
        self._take_state_from(optimizer)
        self._update.replace(state)
        self.has_state = True
