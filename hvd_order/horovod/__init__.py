"""The package ``horovod`` as hvd_order presents it, under its alias.

Every file here stands where Horovod 0.28.1 has one that programs import; it only gives our objects
Horovod's places. `finder` makes ``import horovod...`` come here.
"""

from hvd_order.horovod.runner import run

__all__ = ["run"]

__version__ = "0.28.1"  # of the interface; libraries compare it to decide what they may call
