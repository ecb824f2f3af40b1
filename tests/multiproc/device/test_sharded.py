"""Sharded optimizer state on a device."""

from __future__ import annotations

from pathlib import Path

from helpers.device.device_job import run_on_device

ELSEWHERE = """
from hvd_order.base.errors import InvalidUsage

model = network()
optimizer = wrapped(model, sharded=True)
train(model, optimizer, 4)
try:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
except InvalidUsage as error:
    print("refused:", error)
"""


CHECKPOINT = """
import torch.distributed.checkpoint as dcp

def checkpoint():
    return {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}


model = network()
optimizer = wrapped(model, sharded=True)
train(model, optimizer, 4)
# With one thread it pins memory, which the device lacks.
dcp.save(checkpoint(), storage_writer=dcp.FileSystemWriter(FOLDER, thread_count=2))
train(model, optimizer, 4, begin=4)
expected = weights(model)

model = network(seed=1)
optimizer = wrapped(model, sharded=True)
state = checkpoint()
dcp.load(state, checkpoint_id=FOLDER)
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
train(model, optimizer, 4, begin=4)
print("same from shards:", all(map(torch.equal, weights(model), expected)))
"""


# Of an optimizer that keeps counts on the device, as fused ones do.
COUNTS = """
import copy

model = network()
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True),
    named_parameters=model.named_parameters(), sharded=True,
)
train(model, optimizer, 4)  # the state moves after the second
kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
train(model, optimizer, 4, begin=4)
expected = weights(model)
model.load_state_dict(kept[0])
optimizer.load_state_dict(kept[1])
train(model, optimizer, 4, begin=4)
print("same counts:", all(map(torch.equal, weights(model), expected)))
"""


def test_refusal_and_checkpoints(tmp_path: Path) -> None:
    folder = f"FOLDER = {str(tmp_path / 'saved')!r}\n"
    for each in run_on_device(folder + ELSEWHERE + CHECKPOINT + COUNTS, timeout=100):
        assert each.returncode == 0, each.stderr
        assert "refused: sharded=True sends each sum in two halves" in each.stdout
        assert "parameters are on several devices, asyncdev:0, cpu" in each.stdout
        assert "same from shards: True" in each.stdout
        assert "same counts: True" in each.stdout
