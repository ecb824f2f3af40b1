"""Errors for misuse that all kinds of distributed optimizer share, in Horovod's words."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_order.errors import InvalidUsage

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
    """Raises ValueError for an invalid ``backward_passes_per_step``."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")


def refuse_sparse(names: Sequence[str]) -> None:
    """Refuses sparse gradients: servers that update support dense ones only."""
    if names:
        raise InvalidUsage(
            f"the gradient of '{names[0]}' is sparse, which servers cannot apply; pass "
            "sparse_as_dense=True to DistributedOptimizer or set HVD_ORDER_PS_UPDATE=worker"
        )


def check_server_update(uncompressed: bool, no_postscale: bool) -> None:
    """Refuses work on gradients after the sum, since servers answer with parameters."""
    if not uncompressed:
        raise InvalidUsage(
            "compression is for gradients, but with HVD_ORDER_PS_UPDATE=server parameters come "
            "back; drop it or set HVD_ORDER_PS_UPDATE=worker"
        )
    if not no_postscale:
        raise InvalidUsage(
            "gradient_predivide_factor scales sums, but with HVD_ORDER_PS_UPDATE=server parameters "
            "come back; drop it or set HVD_ORDER_PS_UPDATE=worker"
        )
