"""Gradients of collectives beside those of torch.distributed.nn, as docs/guides/from_ddp.md says.

The guide's function is taken from its page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from helpers.on_ranks import on_ranks

import hvd_order.torch as hvd

PAGE = Path(__file__).parents[3] / "docs/guides/from_ddp.md"
ROWS, WIDTH = 2, 4


def of_the_page() -> Any:
    """`all_gather` as the page writes it."""
    found: dict[str, Any] = {"hvd": hvd}
    (code,) = re.findall(r"```python\n(def all_gather.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, found)
    return found["all_gather"]


def contrastive(gather: Any) -> torch.Tensor:
    """Gradients of a two-tower loss over the embeddings of all ranks, averaged as DDP does."""
    torch.manual_seed(0)
    towers = torch.nn.Linear(WIDTH, WIDTH).double(), torch.nn.Linear(WIDTH, WIDTH).double()
    rows = torch.randn(hvd.size(), 2, ROWS, WIDTH, dtype=torch.float64)[hvd.rank()]
    one, two = (tower(part) for tower, part in zip(towers, rows, strict=True))
    first = hvd.rank() * ROWS
    wanted = torch.arange(first, first + ROWS)
    loss = torch.nn.functional.cross_entropy(one @ gather(two).T, wanted)
    loss = loss + torch.nn.functional.cross_entropy(two @ gather(one).T, wanted)
    loss.backward()
    return torch.cat(
        [hvd.allreduce(p.grad).flatten() for tower in towers for p in tower.parameters()]
    )


def gradient_of(collective: Any) -> torch.Tensor:
    """Gradient of a sum in which each rank weighs each result differently."""
    x = torch.arange(3.0 * hvd.size(), dtype=torch.float64).requires_grad_()
    result = collective(x)
    weights = torch.arange(result.numel(), dtype=torch.float64) + 10 * (hvd.rank() + 1)
    (result.flatten() * weights).sum().backward()
    assert x.grad is not None
    return x.grad


@on_ranks(3)
def test_gradients_are_what_the_page_says(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    all_gather = of_the_page()
    with torch.no_grad():
        assert all_gather(torch.ones(1)).tolist() == [1.0] * hvd.size()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, hvd.size()), rank=hvd.rank(), world_size=hvd.size()
    )
    try:
        nn: Any = torch.distributed.nn
        wanted = contrastive(lambda x: torch.cat(nn.all_gather(x)))
        torch.testing.assert_close(contrastive(all_gather), wanted, rtol=1e-13, atol=1e-15)
        difference = (contrastive(hvd.allgather) - wanted).abs().max() / wanted.abs().max()
        assert difference > 0.1, "the page says that they differ"
        for ours, theirs, factor in [
            (lambda x: hvd.allreduce(x, op=hvd.Sum), nn.all_reduce, 1.0),
            (hvd.allgather, lambda x: torch.cat(nn.all_gather(x)), 1 / hvd.size()),
            (lambda x: hvd.broadcast(x, 1), lambda x: nn.broadcast(x * 1, 1), 1 / hvd.size()),
        ]:
            expected = gradient_of(theirs) * factor
            torch.testing.assert_close(gradient_of(ours), expected, rtol=1e-13, atol=0.0)
    finally:
        dist.destroy_process_group()
    # Of a scattered sum each rank's loss has its own part, weighed by 10 (rank + 1) and on.
    parts = [torch.arange(3.0) + 10 * (rank + 1) for rank in range(hvd.size())]
    got = gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum))
    torch.testing.assert_close(got, torch.cat(parts).double() * hvd.size())
