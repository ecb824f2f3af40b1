"""Lightning's strategy ``hvd_order``: ``import hvd_order.lightning``, then
``Trainer(strategy="hvd_order")``.

It starts and connects processes as Lightning's ``ddp`` does, which torchrun and ``hvd-order run``
may also do, and averages gradients by `hvd_order.torch.DistributedOptimizer` instead of DDP.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise ImportError(
        "hvd_order.lightning needs Lightning; install it with: pip install lightning"
    ) from error
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import hvd_order.torch as hvd

__all__ = ["HvdOrderStrategy"]


class HvdOrderStrategy(DDPStrategy):
    """Synchronous data parallelism with ordered communication; one process a device.

    Optimizers stay what ``configure_optimizers`` returns: they become distributed in place.
    Gradient accumulation, clipping, precision plugins, checkpoints and schedulers work as with
    ``ddp``. Clipping by norm needs all gradients before the step and so costs the overlap with the
    next forward pass.

    Args:
        compression: how gradients are compressed for transfer, of ``hvd.Compression``.
        separable: see `hvd_order.torch.DistributedOptimizer`.
        arguments: of ``DDPStrategy`` that concern processes: ``process_group_backend``,
            ``timeout``, ``cluster_environment``, ``start_method`` and those that the Trainer sets.

    Raises:
        TypeError: an argument concerns DistributedDataParallel, which is not used.
    """

    strategy_name = "hvd_order"

    def __init__(
        self,
        *,
        compression: Any = hvd.Compression.none,
        separable: bool | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        if self._ddp_kwargs or self._ddp_comm_hook or self._model_averaging_period:
            named = ", ".join(self._ddp_kwargs) or "a DDP communication hook or model averaging"
            raise TypeError(
                f"HvdOrderStrategy does not use DistributedDataParallel, so it takes no {named}"
            )
        self._compression = compression
        self._separable = separable
        self._passes = 1

    def setup_environment(self) -> None:
        """Connects the processes, then lets hvd_order join them."""
        super().setup_environment()
        hvd.init()

    def configure_ddp(self) -> None:
        """Gives all ranks rank 0's weights; the model is not wrapped."""
        hvd.broadcast_parameters(self._module.state_dict(), root_rank=0)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Makes the module's optimizers and lets them average gradients."""
        super().setup_optimizers(trainer)
        if self._module.automatic_optimization:
            self._passes = trainer.accumulate_grad_batches
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        for optimizer in self.optimizers:
            if not hasattr(optimizer, "overlap_report"):  # not distributed by the module itself
                hvd.DistributedOptimizer(
                    optimizer,
                    [(names[p], p) for group in optimizer.param_groups for p in group["params"]],
                    compression=self._compression,
                    backward_passes_per_step=self._passes,
                    separable=self._separable,
                )

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Says how many passes add up before the step; a callback may change that."""
        super().pre_backward(closure_loss)
        passes = self._module.trainer.accumulate_grad_batches
        if passes != self._passes and self._module.automatic_optimization:
            self._passes = passes
            for optimizer in self.optimizers:
                optimizer.set_backward_passes_per_step(passes)

    def teardown(self) -> None:
        """Ends pending updates and leaves the job; the process group stays Lightning's."""
        hvd.shutdown()
        super().teardown()

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes the strategy known by its name."""
        strategy_registry.register(
            cls.strategy_name, cls, description="Data parallelism with ordered communication"
        )


if HvdOrderStrategy.strategy_name not in StrategyRegistry:
    HvdOrderStrategy.register_strategies(StrategyRegistry)
