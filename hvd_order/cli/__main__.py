"""``python -m hvd_order.cli``, the same as ``hvd-order``."""

import sys

from hvd_order.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
