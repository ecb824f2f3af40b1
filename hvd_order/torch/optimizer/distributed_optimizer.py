"""``DistributedOptimizer``: the user's optimizer, with its gradients summed over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from hvd_order.base.account.step_stats import StepStats
from hvd_order.base.coded_sums import check_coded
from hvd_order.base.config import Comm
from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.job import process
from hvd_order.engine.process_sets import ProcessSet, global_process_set, require_registered
from hvd_order.engine.requests.reduce_ops import Adasum, Average, ReduceOp
from hvd_order.torch.collectives.compression import CodedSums, Compression, Compressor
from hvd_order.torch.gradients import misuse
from hvd_order.torch.gradients.exchange import GradientExchange
from hvd_order.torch.gradients.misuse import check_passes
from hvd_order.torch.optimizer import adasum_optimizer, arguments, local_statistics
from hvd_order.torch.optimizer.exchange_setup import (
    ExchangeOptions,
    factors,
    make_exchange,
    next_key,
)
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.shards import sharded_dict
from hvd_order.torch.sums.coding import CodedGradient
from hvd_order.torch.updates import optimizer_class, partial_step
from hvd_order.torch.updates.overlap import OverlapReport

__all__ = ["DistributedOptimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class _Distributed:
    """Methods that replace those of the user's class, which stays the base class."""

    _hvd_exchange: GradientExchange | None  # None on a single rank
    _hvd_base: type[Optimizer]
    _hvd_synchronize: bool
    _hvd_sharded: bool
    _hvd_passes: int
    _parameter_names: dict[torch.nn.Parameter, str]  # as Horovod's, which libraries read

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Applies the averaged gradients: to each parameter at the latest when it is next read.

        The update uses the current hyper-parameters. It is complete on return with a ``closure``,
        after ``synchronize()`` or a read of gradients, or with an optimizer that needs all
        parameters at once.

        Raises:
            HorovodInternalError: the exchange failed.
        """
        exchange = self._hvd_exchange
        if exchange is None:
            return partial_step.inner_step(self._hvd_base)(
                self, **kwargs, **({} if closure is None else {"closure": closure})
            )
        if kwargs:
            raise InvalidUsage(
                f"step() of a distributed optimizer takes no {', '.join(kwargs)}; only closure"
            )
        local_statistics.warn_at_first_step(self)
        return exchange.step(closure)

    def synchronize(self) -> None:
        """Waits for the averaged gradients, so that ``.grad`` can be read or clipped.

        ``step()`` then updates at once. Reading a gradient does the same without this call.
        """
        if self._hvd_exchange is not None:
            self._hvd_exchange.synchronize()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the averaged gradients so that the 2-norm of all of them is at most ``max_norm``.

        Same as ``torch.nn.utils.clip_grad_norm_`` for this optimizer's parameters. With
        ``compression`` it saves a pass over the gradients: their squares are added up while the
        sums are unpacked.

        Returns:
            The norm before, one element.
        """
        if self._hvd_exchange is not None:
            return self._hvd_exchange.clip_grad_norm_(max_norm)
        groups = cast("Any", self).param_groups
        return torch.nn.utils.clip_grad_norm_(
            [p for group in groups for p in group["params"]], max_norm
        )

    def flush(self) -> None:
        """Applies every deferred update; for readers of parameters that Python cannot see."""
        if self._hvd_exchange is not None:
            self._hvd_exchange.flush()

    def overlap_report(self) -> OverlapReport:
        """Reports which parameters the last ``step()`` updated without waiting for a reader, and
        why.

        All other updates are applied when their parameters are next read, so their communication
        overlaps the next forward pass.
        """
        return OverlapReport() if self._hvd_exchange is None else self._hvd_exchange.overlap_report

    def stats(self) -> StepStats:
        """Returns where the time of the last steps went, and which rank holds up the others.

        Always on; ranks compare their steps about every ten (docs/guides/step-account.md). Zeros on
        a single rank, and before the first comparison.
        """
        return StepStats() if self._hvd_exchange is None else self._hvd_exchange.stats()

    def compression_report(self) -> list[CodedGradient]:
        """Reports, for each gradient that travels in fewer bits (``Compression.int8``, ``auto``,
        ``bf16_ef``, ``fp16_ef``), the bytes saved, the error of codes of the last sum, and the norm
        of what this rank still owes.

        Finishes the last step's updates. Call it after ``step()``, before ``zero_grad()``.
        """
        return [] if self._hvd_exchange is None else self._hvd_exchange.compression_report()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Horovod's job for a ``step()`` after ``synchronize()``.

        Not needed here, since ``step()`` detects this case; accepted so that scripts run
        unchanged.
        """
        yield

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes that add up before gradients are exchanged; can be set."""
        return self._hvd_passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes the number of backward passes that add up before gradients are exchanged."""
        check_passes(passes)
        self._hvd_passes = passes
        if self._hvd_exchange is not None:
            self._hvd_exchange.set_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Same as ``torch.optim.Optimizer.zero_grad``.

        Raises:
            AssertionError: gradients are in flight, between ``backward()`` and ``step()``.
        """
        exchange = self._hvd_exchange
        base = cast("Any", self._hvd_base)
        if exchange is None:
            base.zero_grad(self, set_to_none)
            return
        exchange.before_zero_grad(set_to_none)
        if not exchange.has_deferred_updates:
            base.zero_grad(self, set_to_none)
            return
        groups = cast("Any", self).param_groups
        rest = []
        for group in groups:
            rest.append({**group, "params": [
                p for p in group["params"] if not exchange.clear(p, set_to_none)
            ]})  # fmt: skip
        cast("Any", self).param_groups = rest
        try:
            base.zero_grad(self, set_to_none)
        finally:
            cast("Any", self).param_groups = groups

    def state_dict(self) -> dict[str, Any]:
        """Same as the optimizer's own method, after applying deferred updates.

        With ``sharded=True`` collective: the state of all ranks, in CPU memory.
        """
        state_dict: Callable[[], dict[str, Any]] = partial(
            cast("Any", self._hvd_base).state_dict, self
        )
        if self._hvd_exchange is None:
            return state_dict()
        self._hvd_exchange.fetch_state()
        shards = self._hvd_exchange.shards
        return state_dict() if shards is None else shards.state_dict(cast("Any", self), state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Same as the optimizer's own method, after applying deferred updates.

        With ``sharded=True`` collective: every rank passes the same whole state, and keeps its
        shards of it; or its dictionary from ``sharded_state_dict()``.
        """
        self.flush()
        load = partial(cast("Any", self._hvd_base).load_state_dict, self)
        if self._hvd_exchange is None:
            if self._hvd_sharded and sharded_dict.is_by_name(state_dict):
                sharded_dict.check_groups(
                    state_dict["param_groups"], cast("Any", self), self._parameter_names
                )
            load(state_dict)
            return
        self._hvd_exchange.use.check_may_load()
        shards = self._hvd_exchange.shards
        if shards is None:
            load(state_dict)
        elif sharded_dict.has_shards(state_dict["state"]):
            shards.load_shards(cast("Any", self), state_dict, load, self._parameter_names)
        else:
            shards.load_state_dict(cast("Any", self), state_dict, load)

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's shards of the state, for ``torch.distributed.checkpoint``. Collective.

        The dictionary has the form and the names of torch's ``get_optimizer_state_dict``: pass it
        to ``dcp.save``; or to ``dcp.load``, which fills it, and then to ``load_state_dict()``. A
        value with one number for each element of a parameter is a tensor of the parameter's shape,
        of which this rank has some boxes; they are the memory of the state, no copies, so the next
        ``step()`` changes them. Master copies are under ``master``. Before there is state, values
        are those of an update with zeros (first_state.py), not kept by the optimizer.

        On a single rank tensors are whole.

        Raises:
            InvalidUsage: not ``sharded=True``, parameters without names, or no default process
                group in torch.distributed.
        """
        misuse.check_has_shards(self._hvd_sharded)
        optimizer = cast("Any", self)
        state_dict: Callable[[], dict[str, Any]] = partial(
            cast("Any", self._hvd_base).state_dict, self
        )
        exchange = self._hvd_exchange
        shards = None if exchange is None else exchange.shards
        if shards is not None:
            return shards.sharded_state_dict(optimizer, state_dict, self._parameter_names)
        return sharded_dict.on_one_rank(
            optimizer,
            state_dict(),
            partial_step.inner_step(self._hvd_base),
            self._parameter_names,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Same as the optimizer's own method. Collective: every rank adds the same parameters."""
        self.flush()
        optimizer = cast("Any", self)
        if self._hvd_exchange is not None:
            params = param_group.get("params")
            if not isinstance(params, torch.Tensor):  # else an iterator would be at its end after
                param_group["params"] = params = list(params or ())
            self._hvd_exchange.check_usable(params)
        cast("Any", self._hvd_base).add_param_group(self, param_group)
        group = optimizer.param_groups[-1]
        names = group.get("param_names") or [
            f"allreduce.noname.{len(optimizer.param_groups) - 1}.{i}"
            for i in range(len(group["params"]))
        ]
        named = list(zip(group["params"], names, strict=True))
        self._parameter_names.update(named)
        if self._hvd_exchange is not None:
            self._hvd_exchange.add_entries([ParameterEntry(p, name) for p, name in named])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the user's own class, after deferred updates."""
        self.flush()
        if self._hvd_exchange is not None and self._hvd_exchange.shards is not None:
            raise InvalidUsage(
                "a sharded optimizer cannot be copied or pickled, since other ranks have most of "
                "its state; use state_dict() on every rank"
            )
        return optimizer_class.rebuild, (self._hvd_base, cast("Any", self).__getstate__())


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: AnyOptimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    comm: Comm | None = None,
    separable: bool | None = None,
    sharded: bool = False,
) -> AnyOptimizer:
    """Makes ``optimizer`` sum its gradients over all ranks, in consumption order.

    The optimizer itself becomes distributed and is returned. It is still an instance of its class
    and keeps its state, so a checkpoint may be loaded before or after. Schedulers and scalers that
    hold it continue to work. Collective: every rank calls it, in the same order.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: the result of ``model.named_parameters()``; must name every parameter of
            the optimizer. Without it the parameters are numbered.
        compression: how gradients are compressed for transfer: ``Compression.none``, ``.fp16``,
            ``.bf16``; with error feedback ``.fp16_ef``, ``.bf16_ef``, in 8 bits ``.int8``, or in 8
            bits where the step waits for the link, ``.auto`` (docs/guides/fewer-bytes.md).
        backward_passes_per_step: number of passes whose gradients add up, without division, before
            they are exchanged.
        op: ``Average`` or ``Sum``; or ``Adasum``, which joins the changes of the ranks' own
            updates (adasum_optimizer.py).
        gradient_predivide_factor: with ``Average``, divide by this before the sum and by size /
            this after it.
        num_groups, groups: Horovod's explicit fusion; checked as in Horovod, without effect, since
            slices of the planned size replace it.
        sparse_as_dense: exchange sparse gradients as dense ones. ``SparseAdam`` gets them back as
            sparse ones.
        process_set: the ranks that exchange gradients. On a rank outside the set, the optimizer
            works alone.
        comm: how gradients are summed: ``"allreduce"`` or ``"ps"``, parameter servers; None: as
            set in HVD_ORDER_COMM.
        separable: whether the optimizer updates each parameter from that parameter's gradient and
            state alone, so that updates may be deferred; None: use its class attribute
            ``hvd_order_separable``, or the list of known classes (known_optimizers.py).
        sharded: each rank keeps the optimizer state of its shards of the parameters only, and
            updates these (ZeRO stage 1; docs/guides/sharded.md). Then parameters travel in place of
            the second half of the sums. The optimizer has to update each element by itself. Between
            ``backward()`` and ``step()`` gradients can be clipped and unscaled, but not read;
            ``step()`` sets ``.grad`` to None. ``state_dict()`` and ``load_state_dict()`` are
            collective. No effect on a single rank.

    Threads may train an optimizer each, in any order on each rank. Optimizers that are made on the
    thread that called ``init()`` belong to those of the other ranks that were made in the same
    place of the order; those that are made on other threads belong together by the names, shapes
    and types of their parameters, so these need names that differ (``named_parameters``).

    Returns:
        ``optimizer``.

    Raises:
        NotInitialized: before ``hvd.init()``.
        ValueError: parameters without name, duplicate names, or arguments out of range.
        ModelMismatch: the ranks have different parameters; raised on every rank.
        InvalidUsage: ``sharded`` with an optimizer, a compression or a transport that does not
            allow it.
        NotImplementedError: Adasum of a number of ranks that is not a power of 2.
    """
    job = process.current()
    number = require_registered(process_set)
    arguments.check_groups(num_groups, groups)
    arguments.check(optimizer, backward_passes_per_step, op, gradient_predivide_factor)
    entries = arguments.named_entries(optimizer, named_parameters)
    size = len(process_set.ranks) if process_set.included() else 1
    if size > 1:
        for entry in entries:
            misuse.check_usable(entry.name, entry.parameter, job.rank)
    summed_by = comm or job.config.comm
    is_allreduce = summed_by == "allreduce"
    is_coded = isinstance(compression, CodedSums)
    if sharded:
        misuse.check_sharded(
            is_coded or compression is Compression.none, is_allreduce, op == Adasum
        )
    if is_coded:
        check_coded(op == Adasum, is_allreduce)
    if op == Adasum and size > 1:
        adasum_optimizer.distribute(
            optimizer, entries, compression, backward_passes_per_step, process_set,
            next_key(number, entries),
        )  # fmt: skip
        cast("Any", optimizer)._parameter_names = {entry.parameter: entry.name for entry in entries}
        return optimizer

    exchange = None
    # One worker exchanges gradients too where there are servers.
    if size > 1 or (number == 0 and job.config.servers is not None and summed_by == "ps"):
        exchange = make_exchange(
            optimizer,
            entries,
            number,
            ExchangeOptions(
                compression=compression,
                passes=backward_passes_per_step,
                factors=factors(op, size, gradient_predivide_factor),
                sparse_as_dense=sparse_as_dense,
                process_set=process_set,
                comm=comm,
                separable=separable,
                sharded=sharded,
            ),
        )
    optimizer_class.give_methods(optimizer, _Distributed)
    cast("Any", optimizer)._hvd_exchange = exchange
    cast("Any", optimizer)._hvd_sharded = sharded
    cast("Any", optimizer)._hvd_passes = backward_passes_per_step
    cast("Any", optimizer)._parameter_names = {entry.parameter: entry.name for entry in entries}
    return optimizer
