"""Ignite's Horovod back end, with `import horovod` meaning hvd_order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.ranks import run_script
from helpers.training.small_problem import alone, equal

pytest.importorskip("ignite")

STEPS = 6

TRAIN = f"""
import sys
import hvd_order.alias
import torch
import torch.distributed as dist
import horovod.torch as hvd
import ignite.distributed as idist
from helpers.training.small_problem import batches, loss_of, new_model, weights_of
from ignite.engine import create_supervised_trainer

if sys.argv[1] == "initialize":
    idist.initialize("horovod")
else:  # a script that calls Horovod itself; Ignite asks who is there
    hvd.init()
    idist.sync()
# This is what its own test_sync_as_hvd_inside_gloo_executor asks.
assert idist.model_name() == "horovod-dist", idist.model_name()
assert idist.backend() == "horovod"
assert (idist.get_rank(), idist.get_world_size()) == (hvd.rank(), hvd.size()) and hvd.size() == 2
assert not dist.is_initialized()

model = new_model()
if hvd.rank() > 0:
    for parameter in model.parameters():
        parameter.data.zero_()
prepared = idist.auto_model(model)  # tells all ranks rank 0's parameters
assert prepared is model
optimizer = idist.auto_optim(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
)
trainer = create_supervised_trainer(prepared, optimizer, loss_of)
trainer.run(batches({STEPS}, hvd.rank(), hvd.size()), max_epochs=1)
torch.save(weights_of(model), sys.argv[2] + str(hvd.rank()))

# Ignite's own test of these two also looks for a private method of Horovod's optimizer.
twice = torch.optim.SGD(new_model().parameters(), lr=0.1)
twice = idist.auto_optim(twice, backward_passes_per_step=2)
assert twice.backward_passes_per_step == 2
rows = idist.auto_dataloader(torch.arange(8), batch_size=4)  # of all ranks together
assert sorted(idist.all_gather(torch.cat(list(rows))).tolist()) == list(range(8))

assert idist.all_reduce(torch.tensor(1.0 + hvd.rank())).item() == 3.0
assert idist.all_gather("rank %d" % hvd.rank()) == ["rank 0", "rank 1"]
assert idist.broadcast("here" if hvd.rank() == 1 else None, src=1, safe_mode=True) == "here"
idist.barrier()
idist.finalize()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", ["initialize", "sync"])
def test_auto_model_and_optim_use_horovod(start: str, tmp_path: Path) -> None:
    expected = alone(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), STEPS)
    for end in run_script(2, TRAIN, start, str(tmp_path / "rank"), timeout=240):
        assert end.returncode == 0, end.stderr
    for rank in range(2):
        assert equal(torch.load(tmp_path / f"rank{rank}"), expected)
