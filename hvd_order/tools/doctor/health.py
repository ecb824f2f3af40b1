"""Whether this installation could train, in some tenths of a second: PyTorch is not imported.

For probes of containers: ``python -m hvd_order.tools.doctor.health``, which imports less than
``hvd-order doctor --health`` does.
"""

from __future__ import annotations

import sys
import tempfile

from hvd_order._native.requirements import why_no_engine
from hvd_order._native.torch_engines import engine_file, torch_release

__all__ = ["main", "problems"]


def problems() -> list[str]:
    """What is wrong, in sentences; empty: nothing that can be seen without PyTorch."""
    found = []
    if torch_release() is None:
        found.append("PyTorch is not installed: pip install torch")
    elif engine_file() is None:
        found.append(why_no_engine())
    try:
        import hvd_order._native._core  # noqa: F401
    except ImportError as error:
        found.append(f"hvd_order's extension cannot be loaded: {error}")
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"1")
    except OSError as error:
        found.append(f"no temporary file can be written: {error}")
    return found


def main() -> int:
    """Prints what is wrong, or what there is; returns 1 or 0."""
    found = problems()
    engine = f"healthy: engine for PyTorch {torch_release()}, Python {sys.version.split()[0]}"
    sys.stdout.write("".join(f"{line}\n" for line in found or [engine]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
