"""An array library that is not numpy: nothing but DLPack, in its new and in its old form."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Copied", "Modern", "Old", "from_dlpack"]


class Modern:
    """An array of a library that speaks DLPack 1.0, read-only flag included."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.values.__dlpack__(**arguments)


class Copied(Modern):
    """An array whose memory no other library may have: it exports copies, and says so."""

    def __dlpack__(self, **arguments: Any) -> Any:
        return super().__dlpack__(**arguments, copy=True)


class Old(Modern):
    """An array of a library that has not heard of versions, as cupy before 13.4."""

    def __dlpack__(self, stream: None = None) -> Any:
        return self.values.__dlpack__()


def from_dlpack(tensor: Any) -> Modern:
    return Modern(np.from_dlpack(tensor))
