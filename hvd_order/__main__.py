"""``python -m hvd_order``, the same as ``hvd-order``."""

import sys

from hvd_order.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
