"""What every kind of distributed optimizer says about the same mistakes, in Horovod's words."""

from __future__ import annotations

__all__: list[str] = []

TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally. "
    "(parameter '{name}')"
)
ZEROED_IN_FLIGHT = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)


def check_passes(passes: int) -> None:
    """Raises ValueError for a ``backward_passes_per_step`` that there is not."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
