"""``horovod.torch``: hvd_order.torch, with the submodules that Horovod has as attributes."""

from hvd_order.compat.horovod.torch import mpi_ops
from hvd_order.torch import *  # noqa: F403
from hvd_order.torch import __all__ as _names
from hvd_order.torch import optimizer
from hvd_order.torch.collectives import compression, functions

__all__ = [*_names, "compression", "functions", "mpi_ops", "optimizer"]
