"""``python -m hvd_order.config`` prints the reference page."""

import sys

from hvd_order.config.reference import reference_page

sys.stdout.write(reference_page())
