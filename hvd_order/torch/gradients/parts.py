"""Makes the parts of a gradient exchange, which then runs the steps (exchange.py)."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch

from hvd_order.engine.account.step_account import StepAccount
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.engine.requests.step_log import StepLog
from hvd_order.torch.gradients.deferred_updates import DeferredUpdates
from hvd_order.torch.gradients.exchange_guard import ExchangeGuard
from hvd_order.torch.gradients.gradient_norms import GradientNorms
from hvd_order.torch.gradients.gradient_transfer import GradientTransfer
from hvd_order.torch.gradients.step_gradients import StepGradients
from hvd_order.torch.gradients.step_recorder import StepRecorder
from hvd_order.torch.gradients.warm_up import WarmUp
from hvd_order.torch.parameters.entry_table import EntryTable
from hvd_order.torch.sums.registered_model import RegisteredModel

__all__: list[str] = []


@dataclass(frozen=True)
class ExchangeParts:
    """What handles one optimizer's gradients. All share a lock, which callers hold.

    Attributes:
        lock: re-entrant.
        guard: takes the lock itself, since readers call it.
    """

    lock: threading.RLock
    model: RegisteredModel
    transfer: GradientTransfer
    table: EntryTable
    warm_up: WarmUp
    norms: GradientNorms
    gradients: StepGradients
    updates: DeferredUpdates
    guard: ExchangeGuard
    account: StepAccount
    recorder: StepRecorder


def make_parts(
    channel: ModelChannel,
    model: RegisteredModel,
    transfer: GradientTransfer,
    log: StepLog,
    separable: bool,
    passes: int,
) -> ExchangeParts:
    """Makes the parts; nothing is registered yet.

    Args:
        channel: of the model.
        log: of the exchange's actions, for joined ranks.
        separable: whether updates may wait for their readers.
        passes: backward passes whose gradients add up before they are exchanged.
    """
    lock = threading.RLock()
    table = EntryTable(passes)
    guards: list[weakref.ref[ExchangeGuard]] = []

    def enter(parameters: list[torch.Tensor]) -> None:
        """For hooks on the user's modules, which must not keep the guard alive."""
        guard = guards[0]()
        if guard is not None:
            guard.enter_region(parameters)

    warm_up = WarmUp(channel, model, enter, separable)
    norms = GradientNorms(model, table, transfer.postscale)
    gradients = StepGradients(channel.host, model, transfer, table, norms, warm_up, log)
    account = StepAccount(channel, talks=channel.host.choice.in_step)
    recorder = StepRecorder(account, model)
    updates = DeferredUpdates(lock, model.use.step, transfer, table, recorder)
    guard = ExchangeGuard(
        lock, table, model, transfer, warm_up, gradients, norms, updates, enter, recorder
    )
    guards.append(weakref.ref(guard))
    return ExchangeParts(
        lock, model, transfer, table, warm_up, norms, gradients, updates, guard, account, recorder
    )
