"""The package ``horovod`` as hvd_order presents it, under its alias.

Every file here corresponds to a file of Horovod 0.28.1 that programs import, and re-exports
hvd_order's objects. `finder` redirects ``import horovod...`` to this package.
"""

from hvd_order.compat.horovod.runner import run

__all__ = ["run"]

__version__ = "0.28.1"  # of the interface; libraries compare it to decide what they may call
