"""``horovod.torch.mpi_ops``: collectives, handles, ranks and reduce operations."""

from hvd_order.torch import *  # noqa: F403
from hvd_order.torch import __all__ as __all__
