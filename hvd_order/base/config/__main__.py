"""``python -m hvd_order.base.config`` prints the reference page."""

import sys

from hvd_order.base.config.reference import reference_page

sys.stdout.write(reference_page())
