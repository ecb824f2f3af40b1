"""Parses and formats bandwidths and times."""

from __future__ import annotations

import re

__all__ = ["byte_rate_text", "parse_duration", "parse_rate", "rate_text", "time_text"]

_RATE_UNITS = {"bit": 1 / 8, "b": 1.0, "byte": 1.0}
_PREFIXES = {
    "": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30
}  # fmt: skip
_ROUNDS_UP = 0.9995  # of a unit: three digits make one of it
_TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_rate(text: str) -> float:
    """Reads a bandwidth such as ``"10gbit"``, ``"25 Gbit/s"``, ``"1.2GB/s"`` or ``"500MiB/s"``.

    ``bit`` is a bit, ``B`` a byte; k, M, G and T are powers of 1000.

    Returns:
        Bytes per second.

    Raises:
        ValueError: the text is no bandwidth, or not positive.
    """
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d*)?)\s*([kmgt]i?)?(bit|byte|b)s?(?:/s|ps)?\s*", text, re.IGNORECASE
    )
    prefix = (match[2] or "").lower() if match else "?"
    if match is None or prefix not in _PREFIXES or float(match[1]) <= 0:
        raise ValueError(f"expected a bandwidth such as 10gbit, 400Mbit/s or 1.2GB/s, got {text!r}")
    # "10gb" means bits at least as often as bytes.
    if match[3] == "b":
        raise ValueError(f"{text!r} may mean bits or bytes; write bit or B")
    return float(match[1]) * _PREFIXES[prefix] * _RATE_UNITS[match[3].lower()]


def parse_duration(text: str) -> float:
    """Reads a time such as ``"50us"``, ``"0.2ms"``, ``"1e-4"`` (seconds), ``"20min"`` or ``"2d"``.

    Returns:
        Seconds.

    Raises:
        ValueError: the text is no time.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e[-+]?\d+)?)\s*([a-z]+)?\s*", text)
    if match is None or (match[2] or "s") not in _TIME_UNITS:
        raise ValueError(
            f"expected a time such as 50us, 0.2ms, 1e-4 (seconds) or 20min, got {text!r}"
        )
    return float(match[1]) * _TIME_UNITS[match[2] or "s"]


def rate_text(bytes_per_s: float) -> str:
    """Formats a bandwidth in the usual unit of links: ``10 Gbit/s``."""
    bits = 8 * bytes_per_s
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= _ROUNDS_UP * size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def byte_rate_text(bytes_per_s: float) -> str:
    """Formats a rate of work on memory: ``2.1 GB/s``."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= _ROUNDS_UP * size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def time_text(seconds: float) -> str:
    """Formats a short time: ``30 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= _ROUNDS_UP * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
