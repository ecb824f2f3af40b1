"""Where a rank offers its metrics: a port of a host, or a folder of files."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["MetricsPlace", "metrics_place"]

_FORM = "expected a port such as 9400, host:port such as 0.0.0.0:9400, or file:/directory"


@dataclass(frozen=True)
class MetricsPlace:
    """Where metrics are.

    Attributes:
        folder: of files for node_exporter's textfile collector; empty: an HTTP server has them.
        host: address that the server listens at.
        port: of the rank with local rank 0; those of the others follow. 0: any free one.
    """

    folder: str = ""
    host: str = "127.0.0.1"
    port: int = 0

    def port_of(self, local_rank: int) -> int:
        """Returns the port of a rank.

        Raises:
            ValueError: there is no such port.
        """
        port = self.port + local_rank if self.port else 0
        if port > 65535:
            raise ValueError(f"port {self.port} + local rank {local_rank} is above 65535")
        return port


def metrics_place(text: str) -> MetricsPlace:
    """Reads ``PORT``, ``HOST:PORT``, ``[IPv6]:PORT`` or ``file:/DIRECTORY``.

    A port alone is one of the loopback interface: metrics are for whoever may ask the host.

    Raises:
        ValueError: the text has none of these forms.
    """
    if text.startswith("file:"):
        folder = text.removeprefix("file:").removeprefix("//")
        if not folder.startswith("/"):
            raise ValueError(f"{_FORM} with an absolute path; got {text!r}")
        return MetricsPlace(folder)
    match = re.fullmatch(r"(?:(\[[0-9a-fA-F:.]+\]|[^:\[\]\s]+):)?(\d{1,5})", text.strip())
    if match is None or int(match.group(2)) > 65535:
        raise ValueError(f"{_FORM}; got {text!r}")
    host = (match.group(1) or "127.0.0.1").strip("[]")
    return MetricsPlace(host=host, port=int(match.group(2)))
