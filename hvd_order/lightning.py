"""Lightning's strategy ``hvd_order``, for its Trainer and for Fabric::

    import lightning, hvd_order.lightning

    trainer = lightning.Trainer(strategy="hvd_order")
    fabric = lightning.Fabric(strategy="hvd_order")

It starts and connects processes as Lightning's ``ddp`` does, which torchrun and ``hvd-order run``
may also do, and averages gradients by `hvd_order.torch.DistributedOptimizer` instead of DDP.

Lightning has two names, ``lightning`` and ``pytorch_lightning``, with classes of their own. The
strategy is there under the name that the program has imported before this module.

``Trainer(callbacks=[hvd_order.lightning.StepStatsCallback()])`` logs where the time of steps goes.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch

import hvd_order.torch as hvd
from hvd_order.watch.callbacks.numbers import numbers_of

__all__ = ["HvdOrderFabricStrategy", "HvdOrderStrategy", "StepStatsCallback"]

_NAME = "hvd_order"
_ABOUT = "Data parallelism with ordered communication"
# Where the strategies of the Trainer and of Fabric are, by the package that a program imports.
_MODULES = {
    "lightning": ("lightning.pytorch.strategies", "lightning.fabric.strategies"),
    "pytorch_lightning": ("pytorch_lightning.strategies", "lightning_fabric.strategies"),
}
_OF_OPTIMIZER = frozenset(inspect.signature(hvd.DistributedOptimizer).parameters) - {
    "optimizer", "named_parameters"
}  # fmt: skip


def _imported() -> list[tuple[Any, Any]]:
    """Modules of strategies: under the names that the program has imported, else of the first."""
    names = [name for name in _MODULES if name in sys.modules]
    for name in names or _MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        names = names or [name]
    if not names:
        raise ImportError(
            "hvd_order.lightning needs Lightning; install it with: pip install lightning"
        )
    return [tuple(map(importlib.import_module, _MODULES[name])) for name in names]  # type: ignore[misc]


_ALL = _imported()
_OfTrainer: Any = _ALL[0][0].DDPStrategy
_OfFabric: Any = _ALL[0][1].DDPStrategy
_Callback: Any = importlib.import_module(
    _ALL[0][0].__name__.replace(".strategies", ".callbacks")
).Callback


class _WithOptions:
    """Takes the options of `hvd_order.torch.DistributedOptimizer` out of a strategy's arguments."""

    def __init__(self, **arguments: Any) -> None:
        self._options = {key: arguments.pop(key) for key in _OF_OPTIMIZER & arguments.keys()}
        super().__init__(**arguments)
        ours: Any = self
        hook = getattr(ours, "_ddp_comm_hook", None) or getattr(
            ours, "_model_averaging_period", None
        )
        if ours._ddp_kwargs or hook:
            named = ", ".join(ours._ddp_kwargs) or "a DDP communication hook or model averaging"
            raise TypeError(
                f"{type(self).__name__} does not use DistributedDataParallel, so it takes no "
                f"{named}; it takes the arguments of hvd_order.torch.DistributedOptimizer"
            )

    def setup_environment(self) -> None:
        """Connects the processes, then lets hvd_order join them."""
        super().setup_environment()  # type: ignore[misc]
        hvd.init()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes the strategy known by its name."""
        if _NAME not in strategy_registry:
            strategy_registry.register(_NAME, cls, description=_ABOUT)


def _distribute(
    optimizer: Any, names: Mapping[torch.Tensor, str], options: Mapping[str, Any]
) -> None:
    if not hasattr(optimizer, "overlap_report"):  # not distributed by the program itself
        named = [(names[p], p) for group in optimizer.param_groups for p in group["params"]]
        hvd.DistributedOptimizer(optimizer, named, **options)


class _TrainerMethods(_WithOptions):
    strategy_name = _NAME
    lightning_module: Any
    optimizers: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._passes = self._options.pop("backward_passes_per_step", 1)

    def configure_ddp(self) -> None:
        """Gives all ranks rank 0's weights; the model is not wrapped."""
        hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the module's optimizers and lets them average gradients."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        module = self.lightning_module
        if module.automatic_optimization:
            self._passes = trainer.accumulate_grad_batches
        names = {parameter: name for name, parameter in module.named_parameters()}
        options = {**self._options, "backward_passes_per_step": self._passes}
        for optimizer in self.optimizers:
            _distribute(optimizer, names, options)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Says how many passes add up before the step; a callback may change that."""
        super().pre_backward(closure_loss)  # type: ignore[misc]
        module = self.lightning_module
        passes = module.trainer.accumulate_grad_batches
        if passes != self._passes and module.automatic_optimization:
            self._passes = passes
            for optimizer in self.optimizers:
                optimizer.set_backward_passes_per_step(passes)


class HvdOrderStrategy(_TrainerMethods, _OfTrainer):
    """The Trainer's strategy: synchronous data parallelism, one process a device.

    Optimizers stay what ``configure_optimizers`` returns: they become distributed in place.
    Gradient accumulation, clipping, precision plugins, checkpoints and schedulers work as with
    ``ddp``, and keep the overlap with the next forward pass where the optimizer alone keeps it.

    Args:
        arguments: those of `hvd_order.torch.DistributedOptimizer` (``compression``, ``sharded``,
            ...), and those of ``DDPStrategy`` that concern processes: ``process_group_backend``,
            ``timeout``, ``cluster_environment``, ``start_method`` and those that the Trainer sets.
            The Trainer's ``accumulate_grad_batches`` sets ``backward_passes_per_step``, except
            with manual optimization.

    Raises:
        TypeError: an argument concerns DistributedDataParallel, which is not used.
    """


class _PassesCount:
    """Stands where Fabric asks for a way to skip an exchange: the number of passes decides."""

    def no_backward_sync(
        self, module: Any, enabled: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        del module, enabled
        return contextlib.nullcontext()


class _FabricMethods(_WithOptions):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._names: dict[torch.Tensor, str] = {}
        self._backward_sync_control = _PassesCount()

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Gives all ranks rank 0's weights; the model is not wrapped."""
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        first = not self._names
        self._names.update({
            p: name if first else f"{len(self._names)}.{name}"
            for name, p in module.named_parameters() if p not in self._names
        })  # fmt: skip
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Lets the optimizer of modules that were set up average their gradients."""
        try:
            _distribute(optimizer, self._names, self._options)
        except KeyError:
            raise RuntimeError(
                "an optimizer has parameters of no module that Fabric has set up; call "
                "fabric.setup(model, optimizer), or fabric.setup_module(model) before "
                "fabric.setup_optimizers(optimizer)"
            ) from None
        return optimizer


class HvdOrderFabricStrategy(_FabricMethods, _OfFabric):
    """Fabric's strategy: synchronous data parallelism, one process a device.

    Optimizers become distributed in place. ``fabric.no_backward_sync`` changes nothing: gradients
    are exchanged in the last of ``backward_passes_per_step`` passes.

    Args:
        arguments: those of `hvd_order.torch.DistributedOptimizer` (``compression``, ``sharded``,
            ``backward_passes_per_step``, ...), and those of ``DDPStrategy`` that concern processes:
            ``process_group_backend``, ``timeout``, ``cluster_environment``, ``start_method``.

    Raises:
        TypeError: an argument concerns DistributedDataParallel, which is not used.
    """


HvdOrderStrategy.register_strategies(_ALL[0][0].StrategyRegistry)
HvdOrderFabricStrategy.register_strategies(_ALL[0][1].STRATEGY_REGISTRY)
for _trainer, _fabric in _ALL[1:]:  # a program that has imported both names
    _of_trainer: Any = type("HvdOrderStrategy", (_TrainerMethods, _trainer.DDPStrategy), {})
    _of_trainer.register_strategies(_trainer.StrategyRegistry)
    _of_fabric: Any = type("HvdOrderFabricStrategy", (_FabricMethods, _fabric.DDPStrategy), {})
    _of_fabric.register_strategies(_fabric.STRATEGY_REGISTRY)


class StepStatsCallback(_Callback):
    """Logs the numbers of the optimizers' accounts of steps, as ``hvd_order/step_s`` and so on.

    They go to all loggers of the Trainer (TensorBoard, W&B, MLflow, CSV), every
    ``log_every_n_steps`` steps, from rank 0, and into ``trainer.callback_metrics``.
    """

    _logged = 0  # step

    def on_train_batch_end(self, trainer: Any, *unused: Any, **also_unused: Any) -> None:
        """Logs what there is after some steps."""
        every, step = trainer.log_every_n_steps, trainer.global_step
        # Several batches may add up to one step.
        if hvd.rank() != 0 or not every or step % every or step == self._logged:
            return
        self._logged = step
        numbers = numbers_of(trainer.optimizers)
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in numbers.items()})
        for logger in trainer.loggers if numbers else []:
            logger.log_metrics(numbers, step=trainer.global_step)
