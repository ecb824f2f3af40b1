"""The settings of hvd_order: `Config`, read from the environment once, in ``init()``.

``docs/config.md`` is made from it: ``python -m hvd_order.base.config > docs/config.md``.
"""

from hvd_order.base.config.knobs import Knob, parse_bytes
from hvd_order.base.config.reference import reference_page
from hvd_order.base.config.settings import (
    KNOBS,
    Agreement,
    Comm,
    Config,
    Consistency,
    Policy,
    Transport,
    Updater,
)

__all__ = [
    "KNOBS",
    "Agreement",
    "Comm",
    "Config",
    "Consistency",
    "Knob",
    "Policy",
    "Transport",
    "Updater",
    "parse_bytes",
    "reference_page",
]
