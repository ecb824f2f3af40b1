"""Paranoid mode (``HVD_ORDER_CHECK_READS=1``): every operator looks for stale parameters.

The read guard works on what Python calls; this looks at what torch runs, so it also sees readers in
C++. It costs some microseconds for each operator, and it does not see inside compiled graphs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_order.errors import StaleRead

if TYPE_CHECKING:
    from hvd_order.torch.exchange import GradientExchange

__all__: list[str] = []


class _CheckReads(TorchDispatchMode):
    def __init__(self, exchange: GradientExchange) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._exchange = weakref.ref(exchange)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        exchange = self._exchange()
        if exchange is not None:
            for value in pytree.tree_leaves((args, kwargs)):
                slot = exchange.slot_of(value) if isinstance(value, torch.Tensor) else None
                if slot is not None and slot.update_pending:
                    raise StaleRead(
                        f"operator {func} reads parameter '{slot.name}' before its update has been "
                        "applied; call optimizer.flush() before this read and report it"
                    )
        return func(*args, **(kwargs or {}))


def install(exchange: GradientExchange) -> None:
    """Checks every operator that this thread runs from now on."""
    _CheckReads(exchange).__enter__()  # type: ignore[no-untyped-call]
