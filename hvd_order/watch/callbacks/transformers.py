"""The account of steps in what ``transformers.Trainer`` logs, to TensorBoard, W&B and MLflow::

from hvd_order.watch.callbacks.transformers import log_step_stats

trainer = Trainer(model, arguments, optimizers=(optimizer, None), ...)
log_step_stats(trainer)
"""

from __future__ import annotations

from typing import Any

from hvd_order.watch.callbacks.numbers import numbers_of

try:
    from transformers import Trainer, TrainerCallback
except ImportError:
    raise ImportError(
        "hvd_order.watch.callbacks.transformers needs transformers: pip install transformers"
    ) from None

__all__ = ["StepStatsTrainerCallback", "log_step_stats"]


class StepStatsTrainerCallback(TrainerCallback):
    """Adds the numbers of the optimizer's account to what the Trainer logs."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Adds them to the logs of this step; reporters that come later see them."""
        numbers = numbers_of([kwargs.get("optimizer")])
        if logs is not None:
            logs.update(numbers)
            state.log_history[-1].update(numbers)


def log_step_stats(trainer: Trainer) -> None:
    """Adds the callback in front of the reporters, which ``add_callback`` would add behind them."""
    trainer.callback_handler.callbacks.insert(0, StepStatsTrainerCallback())
