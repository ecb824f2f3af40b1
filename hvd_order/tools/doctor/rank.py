"""One rank of the doctor's self-test; run as a program, prints ``passed`` or raises.

Two ranks must train the same weights as one process on the whole batch.
"""

from __future__ import annotations

import copy
import sys

import torch

import hvd_order.torch as hvd

__all__: list[str] = []

_STEPS = 5  # from the third on, updates are deferred and transfers ordered


def main() -> None:
    """Runs the test.

    Raises:
        AssertionError: a result is wrong; anything else: something did not work.
    """
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    total = hvd.allreduce(torch.full((1000,), rank + 1.0), op=hvd.Sum)
    expected = size * (size + 1) / 2
    assert torch.equal(total, torch.full((1000,), expected)), f"allreduce gave {total[:3].tolist()}"

    torch.manual_seed(1)
    data, target = torch.randn(8 * size, 16), torch.randn(8 * size, 4)
    alone = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    together = copy.deepcopy(alone)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(together.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=together.named_parameters())
    hvd.broadcast_parameters(together.state_dict(), root_rank=0)
    mine = slice(8 * rank, 8 * (rank + 1))
    for _ in range(_STEPS):
        for model, stepped, part in (
            (alone, reference, slice(None)),
            (together, optimizer, mine),
        ):
            stepped.zero_grad()
            torch.nn.functional.mse_loss(model(data[part]), target[part]).backward()
            stepped.step()
    for (name, ours), theirs in zip(together.named_parameters(), alone.parameters(), strict=True):
        difference = float((ours - theirs).abs().max())
        assert difference < 1e-5, f"after {_STEPS} steps {name} differs by {difference:g}"
    hvd.barrier()
    hvd.shutdown()
    sys.stdout.write("passed\n")


if __name__ == "__main__":
    main()
