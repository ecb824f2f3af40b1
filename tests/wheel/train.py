"""README's five lines around a small model; prints rank 0's weights after ten steps.

Each rank takes its part of the same batch, so any number of ranks gives the same weights.
"""

from __future__ import annotations

import torch

import hvd_order.torch as hvd

hvd.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
inputs, targets = torch.randn(24, 8), torch.randn(24, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
part = slice(hvd.rank() * 24 // hvd.size(), (hvd.rank() + 1) * 24 // hvd.size())
for _ in range(10):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
    optimizer.step()
if hvd.rank() == 0:
    print("weights", *(float(value) for p in model.state_dict().values() for value in p.flatten()))
hvd.shutdown()
