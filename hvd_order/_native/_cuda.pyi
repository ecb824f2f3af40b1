"""Kernels for CUDA; missing where hvd_order was built without nvcc."""

from typing import Final

ARCHITECTURES: Final[str]

def kernels() -> object:
    """A capsule with the table of kernels, for ``_torch.register_kernels()``."""

def state() -> tuple[int, int, str | None]:
    """Versions of runtime and driver (13000 is 13.0; 0: no driver), and why kernels cannot run."""
