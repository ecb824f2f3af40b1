"""``DistributedOptimizer``, its Adasum variant, and the behaviour of both in forked processes."""

from hvd_order.torch.optimizer import fork  # noqa: F401 - watches forks from now on
from hvd_order.torch.optimizer.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
