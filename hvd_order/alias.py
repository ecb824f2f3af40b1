"""``import hvd_order.alias`` makes ``import horovod...`` mean hvd_order, in the whole process.

For scripts and libraries written for Horovod that stay as they are. ``HVD_ORDER_ALIAS=1`` in the
environment does the same without this line. docs/guides/migration.md has both.

Raises:
    ImportError: Horovod itself has been imported already.
"""

from __future__ import annotations

from hvd_order.compat.horovod.finder import install

__all__: list[str] = []

install()
