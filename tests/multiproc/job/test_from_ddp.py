"""A script that comes from DDP and keeps ``init_process_group()``, as docs/guides/from_ddp.md says.

What libraries exchange over the default group still works beside hvd_order.
"""

from __future__ import annotations

from helpers.ranks import run_script

MIGRATED = """
import logging, os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
import hvd_order.torch as hvd

logging.basicConfig(format="%(message)s", level=logging.WARNING)
dist.init_process_group("gloo")
hvd.init()
assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())

rows = TensorDataset(torch.arange(8.0).reshape(8, 1))
sampler = DistributedSampler(rows, shuffle=False)  # asks the default group
loader = DataLoader(rows, batch_size=2, sampler=sampler)

torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.SyncBatchNorm(1).eval())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

total = torch.zeros(())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        model[1].train()  # as on a GPU, whose tensors alone it synchronizes: no cause to warn
        optimizer.step()
        model[1].eval()
        total += batch.sum()
dist.all_reduce(total)  # as torchmetrics' compute() does
assert total.item() == 2 * sum(range(8)), total
weights = [torch.zeros(1, 1) for _ in range(hvd.size())]
dist.all_gather(weights, model[0].weight.detach())
assert torch.equal(*weights)
print(f"rank {hvd.rank()} done")
hvd.shutdown()
dist.destroy_process_group()
"""


def test_a_migrated_script_keeps_its_default_group() -> None:
    ended = run_script(2, MIGRATED)
    for rank, result in enumerate(ended):
        assert result.returncode == 0, result.stderr
        assert f"rank {rank} done" in result.stdout
        assert "SyncBatchNorm" not in result.stderr
