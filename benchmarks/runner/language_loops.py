"""Loops as language models are trained: AdamW, clipping by the global norm, 16-bit weights.

With weights of bfloat16, float32 master copies of them are updated: sharded optimizer state has its
own; for DDP the loop keeps them, as mixed-precision trainers do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.runner.workloads.emulated_device import EmulatedLayer

_LEARNING_RATE = 1e-4


class LanguageLoop:
    """One system with its model.

    Attributes:
        step: forward, backward, clipping, update.
        finish: completes what is outstanding.
        settled: whether the system has tuned itself.
        close: gives back what the system holds.
        state_bytes: of optimizer state and master copies on this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Callable[[], torch.Tensor],
        max_norm: float,
        system: str,
        bfloat16: bool,
        scaler: bool,
        bucket_mib: float,
        env: dict[str, str],
    ) -> None:
        """Builds the system: "ddp", "hvd_order" or "sharded".

        Args:
            max_norm: clips gradients.
            scaler: a GradScaler scales the loss and unscales the gradients.
            bucket_mib: of DDP.
            env: knobs of hvd_order.
        """
        if bfloat16:
            _make_bfloat16(model)
        self._model = model
        self._batch = batch
        self._max_norm = max_norm
        self._scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaler)
        weights = list(model.parameters())
        own_masters = bfloat16 and system == "ddp"
        self._masters = [p.detach().float() for p in weights] if own_masters else []
        self._optimizer: Any = torch.optim.AdamW(
            self._masters or weights, lr=_LEARNING_RATE, foreach=True
        )
        self._exchange: Any = None
        if system == "ddp":
            self._forward: nn.Module = nn.parallel.DistributedDataParallel(
                model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True
            )
        else:
            self._forward = model
            self._distribute(system == "sharded", env)

    def _distribute(self, sharded: bool, env: dict[str, str]) -> None:
        for name in [name for name in os.environ if name.startswith("HVD_ORDER_")]:
            del os.environ[name]
        os.environ.update(env)
        import hvd_order.torch as hvd
        from hvd_order.engine import engine_host

        hvd.init()
        self._optimizer = hvd.DistributedOptimizer(
            self._optimizer, named_parameters=self._model.named_parameters(), sharded=sharded
        )
        self._exchange = self._optimizer._hvd_exchange
        self._host = engine_host.running_host()

    def step(self) -> None:
        """One step."""
        self._model.zero_grad() if self._masters else self._optimizer.zero_grad()
        self._scaler.scale(self._forward(self._batch()).sum()).backward()
        if not self._masters:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
            self._scaler.step(self._optimizer)
            self._scaler.update()
            return
        pairs = list(zip(self._masters, self._model.parameters(), strict=True))
        for master, parameter in pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(self._masters, self._max_norm)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([p for _, p in pairs], self._masters)

    def finish(self) -> None:
        """Completes deferred updates."""
        if self._exchange is not None:
            self._optimizer.flush()

    def close(self) -> None:
        """Gives back what the system holds."""
        if self._exchange is not None:
            import hvd_order.torch as hvd

            hvd.shutdown()

    def settled(self) -> bool:
        """Whether hvd_order's trials are over."""
        return self._exchange is None or bool(self._host.settled)

    def state_bytes(self) -> int:
        """Size of optimizer state and master copies on this rank."""
        shards = None if self._exchange is None else self._exchange.shards
        if shards is not None:
            return int(shards.size_bytes)
        state = [
            value.nbytes
            for values in self._optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ]
        return sum(state) + sum(master.nbytes for master in self._masters)


def _make_bfloat16(model: nn.Module) -> None:
    model.bfloat16()
    for layer in model.children():
        if isinstance(layer, EmulatedLayer):
            layer.gradients = [gradient.bfloat16() for gradient in layer.gradients]
