"""Texts of training scripts, for tests that start a script as a user does."""

from __future__ import annotations

__all__ = ["TRAINS_FOR_EVER", "trains_a_layer"]

TRAINS_FOR_EVER = """
import sys, time
import torch
import hvd_order.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
)
x = torch.randn(4, 256)
step = 0
try:
    while True:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step in (1, 5):
            print(f"reached {step}", flush=True)
except hvd.HorovodInternalError as error:
    print(f"raised {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""
"""Says how far it is, and by which error it ended."""


def trains_a_layer(*, size: int = 4, steps: int = 3) -> str:
    """A script that trains one linear layer, each rank with its own batch; not indented.

    It leaves `model` and `optimizer` to the lines that a test adds, which end it.

    Args:
        size: inputs and outputs of the layer.
        steps: optimizer steps.
    """
    return f"""\
import torch
import hvd_order.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear({size}, {size})
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
for _ in range({steps}):
    optimizer.zero_grad()
    model(torch.full((2, {size}), 1.0 + hvd.rank())).square().mean().backward()
    optimizer.step()
"""
