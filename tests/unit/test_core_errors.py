"""Errors of the C++ core as Python raises them."""

import pytest

from hvd_order._native import _torch
from hvd_order.base import errors


def test_an_error_whose_text_is_not_utf8_keeps_its_class() -> None:
    """Gloo and the C library report in any encoding, and a text may be cut inside a character."""
    with pytest.raises(errors.InvalidUsage, match="/none/\N{REPLACEMENT CHARACTER}"):
        _torch.HorovodTransport(b"/none/\xf0\x9f\x8f", False)  # type: ignore[arg-type]
