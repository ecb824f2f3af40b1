"""Makes the exchange of one optimizer: who carries its sums, and what they are used for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.optim import Optimizer

from hvd_order.base.config import Comm
from hvd_order.engine import engine_host
from hvd_order.engine.job import process
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.engine.process_sets import ProcessSet
from hvd_order.engine.requests.queues import negotiation
from hvd_order.engine.requests.reduce_ops import Average, ReduceOp
from hvd_order.engine.requests.step_log import StepLogs
from hvd_order.torch.collectives.compression import Compression, Compressor
from hvd_order.torch.collectives.functions import allgather_object
from hvd_order.torch.gradients import sparse
from hvd_order.torch.gradients.exchange import GradientExchange
from hvd_order.torch.gradients.gradient_transfer import GradientTransfer
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.sums.registered_model import RegisteredModel
from hvd_order.torch.sums.shard_sums import ShardSums
from hvd_order.torch.sums.sum_use import USES, SumUse
from hvd_order.torch.updates import overlap, partial_step
from hvd_order.torch.updates.separability import Separability, log_reason, separability

__all__: list[str] = []


@dataclass(frozen=True)
class ExchangeOptions:
    """What the program has chosen.

    Attributes:
        passes: backward passes whose gradients add up before they are exchanged.
        factors: of gradients before the sum, and of sums.
        comm: who sums; None: as the existing engine has it, or HVD_ORDER_COMM.
        separable: the user's statement whether updates may be deferred.
        sharded: each rank updates its shards.
    """

    compression: type[Compressor] | Compressor
    passes: int
    factors: tuple[float, float]
    sparse_as_dense: bool
    process_set: ProcessSet
    comm: Comm | None
    separable: bool | None
    sharded: bool


def make_exchange(
    optimizer: Optimizer, entries: Sequence[ParameterEntry], number: int, options: ExchangeOptions
) -> GradientExchange:
    """Makes the exchange, and the engine of the process set if it is the first. Collective.

    Args:
        entries: the optimizer's parameters.
        number: of the process set.

    Raises:
        ModelMismatch: the ranks have different parameters; raised on every rank.
        InvalidUsage: sums cannot be used as the options say.
    """
    logs = _step_logs()
    logs.check_nobody_joined("a DistributedOptimizer is made")
    host = engine_host.engine_host(number, options.process_set.ranks, options.comm)
    channel = ModelChannel(host, next_key(number, entries))
    trainable = [entry for entry in entries if entry.parameter.requires_grad]
    verdict = Separability(False, False, overlap.SWITCHED_OFF)
    if host.job.config.cross_iteration or options.sharded:
        verdict = separability(optimizer, type(optimizer), options.separable)
        if host.rank == 0:
            log_reason(verdict)
    use = _use_of_sums(optimizer, verdict, trainable, channel, options)
    prescale, postscale = options.factors
    model = RegisteredModel(channel, use, options.compression, prescale)
    return GradientExchange(
        optimizer,
        verdict,
        trainable,
        [entry for entry in entries if not entry.parameter.requires_grad],
        channel,
        model,
        GradientTransfer(
            channel,
            model,
            options.compression,
            prescale,
            postscale,
            options.sparse_as_dense,
            options.process_set,
        ),
        logs,
        options.passes,
    )


def _use_of_sums(
    optimizer: Optimizer,
    verdict: Separability,
    trainable: Sequence[ParameterEntry],
    channel: ModelChannel,
    options: ExchangeOptions,
) -> SumUse:
    step = partial_step.inner_step(type(optimizer))
    if options.sparse_as_dense and isinstance(optimizer, torch.optim.SparseAdam):
        step = sparse.with_sparse_gradients(step)
    _, factor = options.factors
    choice = channel.host.choice
    if options.sharded:
        gather = partial(allgather_object, process_set=options.process_set)
        return ShardSums(optimizer, step, verdict, channel, gather, trainable, factor)
    if choice.updates:
        is_compressed = options.compression is not Compression.none
        return USES.find(choice.comm)(optimizer, step, channel, is_compressed, factor)
    return SumUse(step)


def factors(op: ReduceOp, size: int, predivide_factor: float) -> tuple[float, float]:
    """Factors before and after the sum, which together divide it where it is averaged."""
    divisor = size if op == Average else 1
    if predivide_factor != 1.0:
        return 1 / predivide_factor, predivide_factor / divisor
    # A division before the sum costs nothing (it is part of the copy) and prevents overflow.
    return 1 / divisor, 1.0


def next_key(number: int, entries: Sequence[ParameterEntry]) -> str:
    """The key of an exchange that is about to be made, the same on all ranks."""
    return _step_logs().next_key(number, _names_if_threaded(entries))


def _step_logs() -> StepLogs:
    ranks = negotiation()
    assert ranks is not None  # there are other ranks, or servers
    return ranks.steps


def _names_if_threaded(entries: Sequence[ParameterEntry]) -> str | None:
    """What tells an optimizer from those that other threads make; None on the thread of ``init()``.

    Threads have no common order on all ranks, so names, shapes and types have to do.
    """
    if process.current().is_on_own_thread:
        return None
    facts = sorted((s.name, tuple(s.parameter.shape), str(s.parameter.dtype)) for s in entries)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()
    first = f"{facts[0][0]} and {len(facts) - 1} more " if facts else ""
    return f"{first}({digest})"
