"""``DistributedOptimizer(op=hvd.Adasum)``: ranks update separately; Adasum joins the changes.

As in Horovod, every rank takes the step of its own optimizer, with its own gradients and state.
Adasum (adasum.py) combines the resulting changes of each parameter, and the combined change is
applied to the parameter as it was before. So learning rates need no scaling with the number of
ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch.optim import Optimizer

from hvd_order.engine.process_sets import ProcessSet
from hvd_order.engine.requests.adasum import check_count
from hvd_order.engine.requests.reduce_ops import Adasum
from hvd_order.torch.collectives.compression import Compressor
from hvd_order.torch.collectives.grouped import grouped_allreduce_async_
from hvd_order.torch.collectives.single import synchronize
from hvd_order.torch.gradients.misuse import TOO_MANY_PASSES, ZEROED_IN_FLIGHT, check_passes
from hvd_order.torch.optimizer import local_statistics
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.updates import optimizer_class, partial_step

__all__: list[str] = []


class _Passes:
    """Counts the backward passes since the last step."""

    def __init__(self, entries: Sequence[ParameterEntry], allowed: int) -> None:
        self.allowed = allowed
        self._counts: dict[str, int] = {}
        hooks = [self._hook(entry) for entry in entries if entry.parameter.requires_grad]
        weakref.finalize(self, _remove, hooks).atexit = False

    def _hook(self, entry: ParameterEntry) -> Any:
        weak = weakref.ref(self)

        def count(_: torch.Tensor) -> None:
            passes = weak()
            if passes is not None:
                passes._request_server(entry.name)

        return entry.parameter.register_post_accumulate_grad_hook(count)

    def _request_server(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1
        if self._counts[name] > self.allowed:
            raise AssertionError(TOO_MANY_PASSES.format(name=name))

    @property
    def any(self) -> bool:
        return bool(self._counts)

    def clear(self) -> None:
        self._counts.clear()


class _AdasumMethods:
    """Methods that replace those of the user's class, which stays the base class."""

    _hvd_base: type[Optimizer]
    _hvd_exchange: None
    _hvd_passes: _Passes
    _hvd_entries: list[ParameterEntry]
    _hvd_name: str
    _hvd_compression: type[Compressor] | Compressor
    _hvd_process_set: ProcessSet
    _parameter_names: dict[torch.nn.Parameter, str]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes this rank's own step, and applies the Adasum of all ranks' changes.

        Raises:
            HorovodInternalError: the exchange failed; parameters have the values of this rank's
                own step.
        """
        loss = None
        local_statistics.warn_at_first_step(self)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [s.parameter for s in self._hvd_entries if s.parameter.requires_grad]
        before = [p.detach().clone(memory_format=torch.preserve_format) for p in parameters]
        partial_step.inner_step(self._hvd_base)(self)
        self._hvd_passes.clear()
        with torch.no_grad():
            pairs = [
                self._hvd_compression.compress(p.detach() - start)
                for p, start in zip(parameters, before, strict=True)
            ]
            handles = [
                (places, grouped_allreduce_async_(
                    [pairs[i][0].contiguous() for i in places], None, f"{self._hvd_name}.{number}",
                    Adasum, process_set=self._hvd_process_set,
                ))
                for number, places in enumerate(_by_device(parameters))
            ]  # fmt: skip
            for places, handle in handles:
                for i, joined in zip(places, synchronize(handle), strict=True):
                    change = self._hvd_compression.decompress(joined, pairs[i][1])
                    parameters[i].copy_(before[i] + change)
        return loss

    def synchronize(self) -> None:
        """Does nothing: there are no gradients to wait for."""

    def flush(self) -> None:
        """Does nothing: ``step()`` defers no updates."""

    def skip_synchronize(self) -> NoReturn:
        """Raises AssertionError, as in Horovod."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes that add up before a step; can be set."""
        return self._hvd_passes.allowed

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes the number of backward passes that add up before a step."""
        check_passes(passes)
        self._hvd_passes.allowed = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Same as ``torch.optim.Optimizer.zero_grad``.

        Raises:
            AssertionError: between ``backward()`` and ``step()``.
        """
        if self._hvd_passes.any:
            raise AssertionError(ZEROED_IN_FLIGHT)
        cast("Any", self._hvd_base).zero_grad(self, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Same as the optimizer's own method. Every rank adds the same parameters."""
        cast("Any", self._hvd_base).add_param_group(self, param_group)
        added = cast("Any", self).param_groups[-1]["params"]
        first = len(self._hvd_entries)
        self._hvd_entries += [ParameterEntry(p, f"added.{first + i}") for i, p in enumerate(added)]
        self._parameter_names.update({s.parameter: s.name for s in self._hvd_entries[first:]})
        self._hvd_passes = _Passes(self._hvd_entries, self._hvd_passes.allowed)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the user's own class."""
        return optimizer_class.rebuild, (self._hvd_base, cast("Any", self).__getstate__())


def distribute(
    optimizer: Optimizer,
    entries: list[ParameterEntry],
    compression: type[Compressor] | Compressor,
    passes: int,
    process_set: ProcessSet,
    key: str,
) -> None:
    """Makes ``optimizer`` an Adasum optimizer.

    Args:
        optimizer: of the user.
        entries: its parameters.
        compression: of what is sent.
        passes: backward passes whose gradients add up.
        process_set: the ranks that take part.
        key: tells it from the other optimizers; the same on all ranks.

    Raises:
        NotImplementedError: the number of ranks is not a power of 2.
    """
    check_count(len(process_set.ranks))
    optimizer_class.give_methods(optimizer, _AdasumMethods)
    changed = cast("Any", optimizer)
    changed._hvd_exchange = None
    changed._hvd_passes = _Passes(entries, passes)
    changed._hvd_entries = entries
    changed._hvd_name = f"adasum_optimizer {key}"
    changed._hvd_compression = compression
    changed._hvd_process_set = process_set


def _by_device(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Places of the parameters of each device; device numbers differ between ranks."""
    places: dict[torch.device, list[int]] = {}
    for i, parameter in enumerate(parameters):
        places.setdefault(parameter.device, []).append(i)
    return list(places.values())


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
