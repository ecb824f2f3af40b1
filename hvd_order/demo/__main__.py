"""``python -m hvd_order.demo``."""

import sys

from hvd_order.demo.train import main

sys.exit(main())
