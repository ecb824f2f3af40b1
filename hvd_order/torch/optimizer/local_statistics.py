"""The warning of a model whose torch ``SyncBatchNorm`` finds no process group.

Without a default process group, torch's class computes the statistics of each rank's batch alone
and says nothing. Parameters do not lead to their modules, so the first ``step()`` looks for the
modules among all objects, once (20 to 40 ms beside an imported PyTorch).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvd_order.engine.job import process

__all__: list[str] = []

_log = logging.getLogger("hvd_order")


def warn_at_first_step(optimizer: Any) -> None:
    """Warns on rank 0 if modules of the optimizer's parameters should exchange statistics, but
    cannot.

    Args:
        optimizer: a distributed one, with more than one rank.
    """
    if optimizer._hvd_stepped:
        return
    optimizer._hvd_stepped = True
    if process.rank() != 0 or dist.is_initialized():
        return
    names = _norms_in_training(optimizer._parameter_names)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        _log.warning(
            "torch.nn.SyncBatchNorm computes statistics of each rank's batch alone, of '%s'%s: "
            "torch.distributed has no default process group. Call "
            "torch.distributed.init_process_group() before hvd.init(), or use hvd.SyncBatchNorm, "
            "which needs none (documentation: Migrate from DDP)",
            names[0], more,
        )  # fmt: skip


def _norms_in_training(parameter_names: Mapping[torch.nn.Parameter, str]) -> list[str]:
    """Names of the weights of the modules, in the order of the parameters."""
    if not any(parameter.dim() == 1 for parameter in parameter_names):
        return []
    # type(), since proxies answer isinstance() for the object behind them, and may compute it.
    weights = {
        getattr(module, "weight", None)
        for module in gc.get_objects()
        if issubclass(type(module), torch.nn.SyncBatchNorm) and getattr(module, "training", False)
    }
    return [name for parameter, name in parameter_names.items() if parameter in weights]
