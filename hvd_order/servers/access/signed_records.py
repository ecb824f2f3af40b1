"""Signed records in the job's store, where any process can write: an HMAC proves the author.

The signature covers the subject of a record, including its number among similar records, so a
copied record is useless in another place.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from hvd_order.base.errors import NotTrusted

__all__ = ["read_record", "signed_record"]


def signed_record(key: bytes, subject: str, content: Mapping[str, Any]) -> str:
    """Returns a record as stored.

    Args:
        key: the job's secret.
        subject: subject of the record, for example "order 3".
        content: for JSON.
    """
    text = json.dumps(content)
    return json.dumps([text, _proof(key, subject, text)])


def read_record(key: bytes, subject: str, note: bytes) -> dict[str, Any]:
    """Returns the content of a record.

    Raises:
        NotTrusted: the text is not a record, has another subject, or its author lacks the secret.
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
