"""Signed notes in the job's store: anybody can write there, so a note says whose it is by an HMAC.

What a note is about, its number among its like with it, is part of what is signed: a note that was
recorded is of no use in another place.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from hvd_order.errors import NotTrusted

__all__ = ["read_record", "signed_record"]


def signed_record(key: bytes, subject: str, content: Mapping[str, Any]) -> str:
    """A note as it stands in the store.

    Args:
        key: the job's secret.
        subject: what it is about, for example "order 3".
        content: for JSON.
    """
    text = json.dumps(content)
    return json.dumps([text, _proof(key, subject, text)])


def read_record(key: bytes, subject: str, note: bytes) -> dict[str, Any]:
    """What a note says.

    Raises:
        NotTrusted: it is no note, about something else, or not of somebody with the secret.
    """
    try:
        text, proof = json.loads(note)
        if not hmac.compare_digest(proof, _proof(key, subject, text)):
            raise NotTrusted(f"{subject} is not signed with the secret of this job")
        content = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, NotTrusted):  # which is a ValueError
            raise
        raise NotTrusted(f"{subject} is no signed note: {error}") from None
    if not isinstance(content, dict):
        raise NotTrusted(f"{subject} is no signed note: {type(content).__name__}")
    return content


def _proof(key: bytes, subject: str, text: str) -> str:
    return hmac.new(key, f"hvd_order {subject} {text}".encode(), hashlib.sha256).hexdigest()
