"""The account of steps in Ignite's ``engine.state.metrics``, from which its loggers take them::

from hvd_order.watch.callbacks.ignite import log_step_stats

log_step_stats(trainer, optimizer)  # before the logger is attached
logger.attach_output_handler(
    trainer, Events.ITERATION_COMPLETED(every=10), tag="training", metric_names="all"
)
"""

from __future__ import annotations

from typing import Any

from hvd_order.watch.callbacks.numbers import numbers_of

try:
    from ignite.engine import Engine, Events
except ImportError:
    raise ImportError(
        "hvd_order.watch.callbacks.ignite needs Ignite: pip install pytorch-ignite"
    ) from None

__all__ = ["log_step_stats"]


def log_step_stats(trainer: Engine, *optimizers: Any, every: int = 10) -> None:
    """Puts the numbers of the optimizers' accounts into the trainer's metrics.

    Args:
        every: iterations.
    """

    def put(engine: Engine) -> None:
        engine.state.metrics.update(numbers_of(optimizers))

    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=every), put)
