"""``horovod.common.exceptions``."""

from __future__ import annotations

from hvd_order.base.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The text of `HorovodVersionMismatchError`."""
    return (
        f"{name} {installed_version} is installed, but {version} was there when hvd_order was "
        "built; build it again with: pip install --no-build-isolation ."
    )


class HorovodVersionMismatchError(ImportError):
    """Horovod's name for a framework of another version than it was built for; never raised here.

    hvd_order raises an ``ImportError`` of its own then; the class is here to be caught.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version), name=name)
        self.version = version
        self.installed_version = installed_version
