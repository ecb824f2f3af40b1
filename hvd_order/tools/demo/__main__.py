"""``python -m hvd_order.tools.demo``."""

import sys

from hvd_order.tools.demo.train import main

sys.exit(main())
