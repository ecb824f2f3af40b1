"""Imported at interpreter start when ``HVD_ORDER_ALIAS`` is set, by hvd_order_alias.pth.

Python reads the .pth files of site-packages at every start, so a script needs no import line of
ours. Without the variable that costs one look into the environment.
"""

from __future__ import annotations

import os

from hvd_order.compat.horovod.finder import install

# Other words are refused where all variables are read: in init(), with a message.
if os.environ.get("HVD_ORDER_ALIAS", "").strip().lower() in ("1", "true", "yes", "on"):
    install()
