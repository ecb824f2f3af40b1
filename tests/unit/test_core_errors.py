"""Errors of the C++ core as Python raises them."""

import pytest

from hvd_order._native import _core
from hvd_order.base import errors


def test_an_error_whose_text_is_not_utf8_keeps_its_class() -> None:
    """Gloo and the C library report in any encoding, and a text may be cut inside a character."""
    engine = _core.Engine(
        rank=0,
        size=1,
        agreement=_core.AgreementKind.LEADER,
        policy=_core.Policy.PRIORITY,
        credit_bytes=1,
        timeout_s=10,
        stall_warning_s=10,
        transport=_core.LoopbackWorld(1).transport(0),
        control=None,
    )
    engine.fail(b"connection reset \xf0\x9f\x8f", lost=True)  # type: ignore[arg-type]
    with pytest.raises(errors.PeerLost, match="connection reset \N{REPLACEMENT CHARACTER}"):
        engine.check()
    engine.shutdown()
