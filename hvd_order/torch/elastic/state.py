"""`TorchState`: models, optimizers, samplers and plain objects of an elastic job.

Names and the registry of handlers are Horovod 0.28.1's (horovod/torch/elastic/state.py).
"""

from __future__ import annotations

import copy
import functools
from typing import IO, Any

import torch

from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.job.process import rank
from hvd_order.launch.elastic.state import ObjectState
from hvd_order.torch.collectives.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvd_order.torch.elastic.sampler import ElasticSampler

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

# Names of collectives: a call on some of the ranks never meets another collective of the program.
_STATE = "elastic state"
_SAMPLER = "elastic sampler"


class TorchState(ObjectState):
    """State of a PyTorch training process; every keyword becomes an attribute.

    Args:
        model: a model, or None.
        optimizer: an optimizer, or None; a ``DistributedOptimizer`` as well.
        kwargs: further models, optimizers, samplers and picklable objects (epoch, batch, ...).
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        self._handlers, objects = _get_handlers(kwargs)
        for name, handler in self._handlers.items():
            setattr(self, name, handler.value)
        super().__init__(
            bcast_object=functools.partial(broadcast_object, name=_STATE),
            get_rank=rank,
            allgather_object=functools.partial(allgather_object, name=_STATE),
            **objects,
        )

    def save(self) -> None:
        """See `hvd_order.launch.elastic.State.save`. All ranks must call it with a sampler."""
        for handler in self._handlers.values():
            handler.gather()
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """See `hvd_order.launch.elastic.State.restore`."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """See `hvd_order.launch.elastic.State.sync`."""
        for handler in self._handlers.values():
            handler.sync()
            handler.save()  # else restore() would return to the state before this rank joined
        super().sync()

    def saved(self) -> Any:
        """See `hvd_order.launch.elastic.State.saved`."""
        handlers = {
            name: {key: value for key, value in vars(handler).items() if key != "value"}
            for name, handler in self._handlers.items()
        }
        return handlers, super().saved()

    def set_saved(self, saved: Any) -> None:
        """See `hvd_order.launch.elastic.State.set_saved`."""
        handlers, objects = saved
        for name, values in handlers.items():
            if name in self._handlers:
                vars(self._handlers[name]).update(values)
        super().set_saved(objects)

    def dump(self, saved: Any, file: IO[bytes]) -> None:
        """See `hvd_order.launch.elastic.State.dump`."""
        torch.save(saved, file)

    def load(self, file: IO[bytes]) -> Any:
        """See `hvd_order.launch.elastic.State.load`. Loads to the CPU; restoring moves tensors."""
        return torch.load(file, map_location="cpu", weights_only=False)  # our own file

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name) and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Saves, restores and synchronizes one kind of object.

    Attributes of the handler hold what it saves; all but `value` must be picklable.

    Attributes:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copies the value's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Gives the value the copied state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives the value the state of rank 0."""
        raise NotImplementedError

    def gather(self) -> None:
        """Merges the state that differs between ranks, before it is saved; on all ranks."""

    def set_value(self, value: Any) -> None:
        """Switches the handler to another object."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Parameters and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.save()

    def save(self) -> None:
        """See `StateHandler`."""
        self._saved_model_state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """See `StateHandler`."""
        self.value.load_state_dict(self._saved_model_state)

    def sync(self) -> None:
        """See `StateHandler`."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """State and hyper-parameters of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        exchange = getattr(optimizer, "_hvd_exchange", None)
        if exchange is not None and exchange.shards is not None:
            raise InvalidUsage(
                "an elastic job cannot use sharded=True: the state of a rank that is lost exists "
                "on no other rank"
            )
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        """See `StateHandler`."""
        self._saved_optimizer_state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """See `StateHandler`."""
        self.value.load_state_dict(self._saved_optimizer_state)

    def sync(self) -> None:
        """See `StateHandler`."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """Processed samples of the epoch."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self.save()

    def save(self) -> None:
        """See `StateHandler`."""
        self._saved_sampler_state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """See `StateHandler`."""
        self.value.load_state_dict(self._saved_sampler_state)

    def sync(self) -> None:
        """See `StateHandler`. Samples that other ranks have recorded since stay processed."""
        self.gather()
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name=_SAMPLER))

    def gather(self) -> None:
        """See `StateHandler`. Only the rank that recorded an index by itself has it."""
        # Always: a rank cannot know whether another one has recorded something.
        records = allgather_object((self.value.epoch, self.value.processed_indices), name=_SAMPLER)
        for epoch, indices in records:
            if epoch == self.value.epoch:
                self.value.processed_indices.update(indices)


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """The handler class for each kind of object; the first match applies."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces the registry, for states made from now on."""
    # The list itself and not a copy: callers get it, set another one, and set it again.
    global _handler_registry
    _handler_registry = registry


def _get_handlers(kwargs: dict[str, Any]) -> tuple[dict[str, StateHandler], dict[str, Any]]:
    """Handlers of the objects that have one, and the other objects."""
    handlers: dict[str, StateHandler] = {}
    objects: dict[str, Any] = {}
    for name, value in kwargs.items():
        handler = next((cls for kind, cls in _handler_registry if isinstance(value, kind)), None)
        if handler is None:
            objects[name] = value
        else:
            handlers[name] = handler(value)
    return handlers, objects
